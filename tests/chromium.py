"""A headless Chromium for tests and benchmarks."""

import shutil
import time

from playwright.sync_api import sync_playwright

LONGEST_S = 60

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser; its complaints and the addresses it asked for, since the last :meth:`open`."""

    def __init__(self):
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        self._page = self._browser.new_page()
        self._page.set_default_timeout(1000 * LONGEST_S)
        self.complaints, self.requests = [], []
        self._page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._page.on("console", lambda message: self.complaints.append(message.text))
        self._page.on("request", lambda request: self.requests.append(request.url))

    def __call__(self, script):
        """The value of a piece of JavaScript in the page."""
        return self._page.evaluate(script)

    def open(self, url, width=1280, *, dark=False, height=900):
        """Show an address, and wait until its script has drawn."""
        self._page.emulate_media(color_scheme="dark" if dark else "light")
        self._page.set_viewport_size({"width": width, "height": height})
        # Another page in between: an address that differs after the # alone would not be loaded again.
        self._page.goto("about:blank")
        self.complaints.clear()
        self.requests.clear()
        self._page.goto(url)
        self.until("document.documentElement.dataset.ready !== undefined")

    def until(self, condition, longest_s=LONGEST_S):
        """Wait until a piece of JavaScript is true; how long it took, in seconds."""
        began = time.monotonic()
        while not self(condition):  # wait_for_function would evaluate a text, which the page's policy forbids
            waited = time.monotonic() - began
            assert waited < longest_s, f"never true: {condition}; {self.complaints}"
            self._page.wait_for_timeout(20)
        return time.monotonic() - began

    def press(self, key):
        self._page.keyboard.press(key)

    def mouse(self, *places):
        """Press the left button at the first place (x, y), move over the others, release it at the last."""
        self._page.mouse.move(*places[0])
        self._page.mouse.down()
        for place in places[1:]:
            self._page.mouse.move(*place)
        self._page.mouse.up()

    def close(self):
        self._browser.close()
        self._playwright.stop()
