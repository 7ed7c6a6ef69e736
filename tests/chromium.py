"""A headless Chromium for tests and benchmarks."""

import shutil
import time

from playwright.sync_api import sync_playwright

LONGEST_S = 180
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page of a browser; its complaints and the addresses it asked for, since the last :meth:`open`."""

    def __init__(self):
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        self.page = self._browser.new_page()
        self.complaints = []
        self.requests = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def __call__(self, script):
        """The value of a piece of JavaScript in the page."""
        return self.page.evaluate(script)

    def open(self, url, width=1280, *, dark=False, height=900):
        """Show an address, and wait until its script has drawn."""
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.set_viewport_size({"width": width, "height": height})
        # Another page in between: an address that differs after the # alone would not be loaded again.
        self.page.goto("about:blank")
        self.complaints.clear()
        self.requests.clear()
        self.page.goto(url)
        self.until("document.documentElement.dataset.ready !== undefined")

    def until(self, condition):
        """Wait until a piece of JavaScript is true; how long it took, in seconds."""
        began = time.monotonic()
        # wait_for_function would evaluate a text, which the page's policy forbids
        while not self(condition):
            waited = time.monotonic() - began
            assert waited < LONGEST_S, f"never true: {condition}; {self.complaints}"
            self.page.wait_for_timeout(20)
        return time.monotonic() - began

    def close(self):
        self._browser.close()
        self._playwright.stop()
