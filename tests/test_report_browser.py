"""The report page in a real browser: nothing is fetched, nothing complains, search, plots and keys work."""

import json
import os
import select
import shutil
import subprocess
import time

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from storage import ProbeRows

LONGEST_S = 60
HOSTILE = "<script>alert(1)</script></script><!-- <img src=x onerror=alert(2)> \x1b[2J\u202e&amp;"

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A headless Chromium, spoken to in its DevTools protocol over a pipe."""

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

    def open(self, path, width=1280, *, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.complaints.clear()
        self.requests.clear()
        self._call("Page.navigate", url=path.as_uri())
        # No script before: an answer that is due while one page gives way to the next never comes.
        self._await(lambda message: message.get("method") == "Page.loadEventFired")
        assert self("document.documentElement.dataset.ready") is not None, self.complaints

    def until(self, condition):
        for _ in range(400):
            if self(condition):
                return
            time.sleep(0.05)
        raise AssertionError(f"never true: {condition}; {self.complaints}")

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                       text="\r" if key == "Enter" and kind == "keyDown" else "")  # fmt: skip

    def close(self):
        self._call("Browser.close")
        self._process.wait(20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs a Chromium; on Debian: apt-get install chromium")
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture
def page(open_new, fill, tmp_path):
    """A report of 60 prompts and 3 epochs, some of whose texts are hostile; its path."""
    store = open_new("sqlite")
    run = fill.run(store, model=HOSTILE, config={"seed": 7})
    texts = [f"Question {i}: what is {i} + {i}?" for i in range(58)] + [HOSTILE, "x" * 100_000]
    ids = store.register_prompts(texts, [str(2 * i) for i in range(60)])
    for step in range(1, 4):
        probes = ProbeRows(ids[:3], *(np.full(3, value) for value in (8, 4.0, 4.0)))
        fill.step(run, step, ids, np.arange(60) * step % 5, probes=probes, shared={"discount": np.array([step / 4])})
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    return path


def _search(browser, text):
    browser(f"""(() => {{ const field = document.getElementById("search");
                 field.value = {json.dumps(text)}; field.dispatchEvent(new Event("input")); }})()""")
    return browser('document.getElementById("hits").textContent')


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page_opens_without_a_complaint_or_a_request(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    browser.until('document.querySelectorAll("#by-step > svg .curve").length == 2')
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}
    assert browser("document.documentElement.scrollWidth") <= width  # nothing sticks out of a phone
    assert browser('document.querySelectorAll("#histograms .bar").length') == 3 * 20
    assert browser('document.querySelectorAll("#state-bars rect").length') == 3 * 4
    assert browser('document.querySelectorAll("#probe-errors > svg .curve").length') == 2
    assert browser('document.querySelectorAll("#shared-charts figure > svg .curve").length') == 1
    assert (
        browser('document.querySelectorAll("script").length') == 2
        and browser('document.querySelector("main img")') is None
    )
    background = browser("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_search_filter_sort_and_pages(browser, page):
    browser.open(page)
    shown = 'document.querySelectorAll("#table tbody tr").length'
    first = 'document.querySelector("#table tbody tr td").textContent'
    text = 'document.querySelector("#table tbody tr td:last-child").textContent'
    assert _search(browser, "") == "60 of 60 prompts" and browser(shown) == 25
    assert _search(browser, "WHAT IS 12 +") == "1 of 60 prompts" and browser(text) == "Question 12: what is 12 + 12?"
    assert _search(browser, "no such text") == "0 of 60 prompts" and browser(shown) == 0
    _search(browser, "")
    browser('document.querySelector("#table thead button").click()')
    assert browser('document.querySelector("#table th").ariaSort') == "descending" and browser(first) == "60"
    browser('document.getElementById("next").click()')
    assert browser(first) == "35" and browser('document.getElementById("page").textContent') == "page 2 of 3"
    # S = i * step mod 5: every fifth prompt is never solved
    browser('document.querySelector("#definitions button[aria-label$=impossible]").click()')
    assert browser('document.getElementById("hits").textContent') == "12 of 60 prompts"
    assert browser("document.activeElement.id") == "state"


def test_a_prompts_history_by_keyboard(browser, page):
    browser.open(page)
    _search(browser, "onerror")
    browser('document.querySelector("#table tbody button").focus()')
    browser.press("Enter", 13)
    browser.until('document.querySelectorAll("#prompt-chart > svg .curve").length == 1')
    assert browser('document.getElementById("prompt").open')
    text = browser('document.getElementById("prompt-text").textContent')
    assert text.startswith("<script>alert(1)</script></script><!-- <img src=x onerror=alert(2)>")
    assert browser('document.querySelectorAll("#prompt-chart .band").length') == 1
    assert browser('document.querySelectorAll("#prompt-chart > svg .dot.s1").length') == 3
    # prompt 58, S = 3, 1, 4: alpha 3.5, 2.75, 5.375; beta 1.5, 3.75, 1.875
    cells = """[...document.querySelectorAll("#prompt-visits tbody tr")]
               .map((row) => [...row.cells].slice(0, 6).map((cell) => cell.textContent))"""
    assert browser(cells) == [
        ["1", "4", "3", "3.5", "1.5", "0.700"],
        ["2", "4", "1", "2.75", "3.75", "0.423"],
        ["3", "4", "4", "5.38", "1.88", "0.741"],
    ]
    browser.press("Escape", 27)
    assert not browser('document.getElementById("prompt").open')
    assert browser.complaints == []


def test_a_chart_is_read_by_arrow_keys(browser, page):
    browser.open(page)
    browser.until('document.querySelectorAll("#by-step > svg .curve").length == 2')
    browser('document.querySelector("#by-step > svg").focus()')
    browser.press("ArrowLeft", 37)
    assert browser('document.querySelector("#by-step .readout").textContent').startswith("step 2: success rate ")


def _texts(browser, selector):
    return browser(f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.textContent)")


@pytest.fixture
def filtered_page(open_new, fill, tmp_path):
    """A report of 4 prompts and 2 steps of 16 and 8 rollouts; step 2 filters out the zero-variance group."""
    store = open_new("sqlite")
    run = fill.run(store, method="dapo")
    ids = np.sort(fill.prompts(store, 4))
    fill.step(run, 1, ids, [4, 0, 2, 1])
    usage = fill.usage(ids[:2], [4, 2], trained=[0, 4], trained_tokens=[0, 40], informative=[0, 4], rescued=[0, 0])
    fill.step(run, 2, ids[:2], [4, 2], usage=usage, shared={"discount": np.array([0.5])})
    run.finish(unused_rollouts=7)
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_where_the_rollouts_went(browser, filtered_page, width, dark):
    browser.open(filtered_page, width, dark=dark)
    browser.until('document.querySelectorAll("#usage-by-step > svg rect").length == 2 * 4')
    assert browser.complaints == [] and browser("document.documentElement.scrollWidth") <= width
    assert browser('document.getElementById("subtitle").textContent').startswith("dapo \u00b7 dbb")
    numbers = dict(zip(_texts(browser, "#usage-numbers dt"), _texts(browser, "#usage-numbers dd"), strict=True))
    assert numbers == {
        "rollouts generated": "24", "trained on": "20", "filtered out": "4", "replayed": "13", "prompts skipped": "6",
        "tokens generated": "240", "informative groups": "83.3%",  # 5 of 6
        "rollouts per informative group": "4.8", "tokens per informative group": "48", "unused at the end": "7",
    }  # fmt: skip
    assert _texts(browser, "#usage-parts dt") == [
        "mixed: 12 (50.0%)", "rescued: 8 (33.3%)", "no advantage: 0 (0.0%)", "filtered out: 4 (16.7%)",
    ]  # fmt: skip
    height = """[...document.querySelectorAll("#usage-by-step > svg rect")]
                .map((bar) => Math.round(bar.getAttribute("height") / %s))"""
    tallest = browser(height % 1)[0]  # 8 rollouts of 16 on 180 pixels
    assert browser(height % (tallest / 8)) == [8, 4, 8, 0, 0, 0, 0, 4]
    assert _texts(browser, "#usage-beside .legend li") == ["rollouts replayed", "prompts skipped"]
    rescued = 'getComputedStyle(document.querySelector("#usage-by-step > svg rect.rescued")).fill'
    assert browser(rescued) == ("rgb(53, 201, 154)" if dark else "rgb(0, 158, 115)")  # green in both


def test_one_switch_draws_all_curves_over_rollouts(browser, filtered_page):
    browser.open(filtered_page)
    charts = ["by-step", "zero-variance-by-step", "usage-by-step", "usage-beside"]
    readouts = ", ".join(f"#{chart} .readout" for chart in charts) + ", #shared-charts .readout"
    browser.until('document.querySelectorAll("#by-step > svg .curve").length == 2')
    assert all(text.startswith("step 2: ") for text in _texts(browser, readouts))
    browser('document.querySelector("#axis input[value=rollouts]").focus()')
    browser.press(" ", 32)
    browser.until('document.querySelector("#by-step .readout").textContent.startsWith("step 2, 24 rollouts: ")')
    assert all(text.startswith("step 2, 24 rollouts: ") for text in _texts(browser, readouts))
    assert browser('document.querySelector("#by-epoch .readout").textContent').startswith("epoch 2: ")
    # bars of 16 and 8 rollouts
    wide = """[...document.querySelectorAll("#usage-by-step > svg rect.mixed")]
              .map((bar) => Number(bar.getAttribute("width")) + 1)"""
    first, second = browser(wide)
    assert first / second == pytest.approx(2, rel=1e-3)
    browser('document.querySelector("#table tbody button").click()')
    browser.until('document.querySelectorAll("#prompt-chart > svg .curve").length == 1')
    assert browser('document.querySelector("#prompt-chart .readout").textContent').startswith("step 2, 24 rollouts: ")
    assert browser('document.getElementById("prompt-facts").textContent').endswith(
        "2 visits. Rollouts: 8 generated, 4 trained on, 4 filtered out, 8 replayed; skipped 2 times"
    )
    browser.press("Escape", 27)
    browser('document.querySelector("#axis input[value=steps]").click()')
    browser.until('document.querySelector("#by-step .readout").textContent.startsWith("step 2: ")')
    assert browser('document.querySelectorAll("#by-step > svg").length') == 1 and browser.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_held_out_accuracy_comes_first(browser, open_new, fill, tmp_path, width):
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 2)
    for step, successes in enumerate([[1, 0], [4, 3], [2, 2]]):
        if step:
            fill.step(run, step, ids, [4, 1])
        run.record_evaluation(step, "training", [fill.evaluation(ids, successes)], model="", config={})
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    browser.open(path, width)
    browser.until('document.querySelectorAll("#held-out > svg .dot").length == 3')
    tiles = list(zip(_texts(browser, "#numbers dt"), _texts(browser, "#numbers dd"), strict=True))
    assert tiles[:4] == [
        ("held-out accuracy, step 0", "12.5%"), ("held-out accuracy, step 2", "50.0%"),
        ("best held-out accuracy, step 1", "87.5%"), ("training success, epoch 1", "62.5%"),
    ]  # fmt: skip
    assert _texts(browser, "#held-out figcaption") == ["Held-out accuracy, 2 prompts \u00d7 4 samples"]
    assert _texts(browser, "#held-out .readout") == ["step 2: held-out accuracy 50.0%"]
    browser('document.querySelector("#axis input[value=rollouts]").click()')
    browser.until('document.querySelector("#held-out .readout").textContent.startsWith("step 2, 16 rollouts: ")')
    assert browser.complaints == [] and browser("document.documentElement.scrollWidth") <= width


def test_a_run_without_recorded_usage_has_no_section_and_no_switch(browser, open_new, fill, tmp_path):
    store = open_new("sqlite")
    fill.step(fill.run(store), 1, fill.prompts(store, 2), [1, 4], usage=None)
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    browser.open(path)
    browser.until('document.querySelectorAll("#by-step > svg .curve").length == 2')
    for hidden in ("usage", "usage-link", "axis", "held-out"):
        assert browser(f'document.getElementById("{hidden}").getClientRects().length') == 0
    assert browser('document.getElementById("subtitle").textContent').startswith("dbb version 1")
    browser('document.querySelector("#table tbody button").click()')
    assert browser('document.getElementById("prompt-facts").textContent').endswith("1 visits")
    assert browser.complaints == []


def test_a_run_without_steps_opens(browser, open_new, fill, tmp_path):
    store = open_new("sqlite")
    fill.run(store)
    path = tmp_path / "report.html"
    assert main(["report", "-o", str(path), "--store.url", store.url]) == 0
    browser.open(path)
    assert browser.complaints == [] and browser('document.getElementById("curves").hidden')
