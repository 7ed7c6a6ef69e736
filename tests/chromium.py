"""A headless Chromium for tests and benchmarks, spoken to in its DevTools protocol over a pipe."""

import json
import os
import select
import shutil
import subprocess
import time

LONGEST_S = 60

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser; its complaints and the addresses it asked for, since the last :meth:`open`."""

    def __init__(self, folder):
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run"
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The protocol is spoken on descriptors 3 and 4.
        program = f"exec '{CHROMIUM}' {flags} '--user-data-dir={folder}' about:blank 3<&{commands} 4>&{answers}"
        self._process = subprocess.Popen(
            ["bash", "-c", program], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, {}
        self.complaints, self.requests = [], []
        (page,) = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method, **params):
        self._number += 1
        command = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        answer = self._await(lambda message: message.get("id") == self._number)
        assert "error" not in answer, answer
        return answer["result"]

    def _await(self, wanted):
        """The next message that is ``wanted``; complaints and requests on the way are noted."""
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._answers], [], [], LONGEST_S)[0], "the browser does not answer"
                part = os.read(self._answers, 1 << 20)
                assert part, "the browser has ended"
                self._buffer += part
            raw, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(raw)
            if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.complaints.append(message["params"])
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if wanted(message):
                return message

    def __call__(self, script):
        """The value of a piece of JavaScript in the page."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url, width=1280, *, dark=False, height=900):
        """Show an address, and wait until its script has drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        # Another page in between: an address that differs after the # alone would not be loaded again.
        for address in ("about:blank", url):
            self.complaints.clear()
            self.requests.clear()
            self._call("Page.navigate", url=address)
            # No script before: an answer that is due while one page gives way to the next never comes.
            self._await(lambda message: message.get("method") == "Page.loadEventFired")
        self.until("document.documentElement.dataset.ready !== undefined")

    def until(self, condition, longest_s=LONGEST_S):
        """Wait until a piece of JavaScript is true; how long it took, in seconds."""
        began = time.monotonic()
        while not self(condition):
            waited = time.monotonic() - began
            assert waited < longest_s, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)
        return time.monotonic() - began

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                       text="\r" if key == "Enter" and kind == "keyDown" else "")  # fmt: skip

    def mouse(self, *places):
        """Press the left button at the first place (x, y), move over the others, release it at the last."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(places) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*places, places[-1]], strict=True):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def close(self):
        self._call("Browser.close")
        self._process.wait(20)
