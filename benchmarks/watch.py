"""The page of ``openrlhf-dbb serve`` in a real Chromium beside a long run, and what watching costs the run.

- First paint and the first view of a run with 5 million rows of history, beside the time of the plain SQL for that
  view; then the time to read the whole history.
- The picture of a pool of 20,480 prompts: until it is drawn, a frame while the pointer moves over it, and its drawing
  after a step.
- An update while the page is open: from a step's commit to its drawing, and the drawing alone.
- Ten clients that ask like the page while a run records 20 steps a second: the writer's time for a step with clients,
  divided by the time without. The two alternate.

    python benchmarks/watch.py            about 5 minutes, 2 GiB of memory and of a local disk
    python benchmarks/watch.py --quick    a tenth of the rows
    python benchmarks/watch.py --check    exit code 1 if a bound is missed
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chromium import CHROMIUM, Browser
from store_content import Trainer, create, fill, texts

from openrlhf_dbb.storage import open_store

PROMPTS, PASSES, A_STEP = 50_048, 100, 128  # 39,100 steps
POOL, POOL_PASSES, POOL_STEP = 20_480, 10, 256  # 800 steps
BOUNDS = {
    "first paint s": 1.0,
    "drawing an update ms": 100.0,
    "commit to drawn s": 2.0,
    "step with clients / without": 1.05,
    "pointing at the pool, ms a frame": 34.0,
    "drawing the pool ms": 100.0,
}
CLIENTS, STEPS_A_SECOND, TURN_S, TURNS = 10, 20, 5.0, 12
METRICS = (
    "policy_loss",
    "kl",
    "entropy_loss",
    "actor_grad_norm",
    "ppo_clip_ratio",
    "response_length",
)
RUNNING = "Object.fromEntries(performance.getEntriesByType('{}').map((e) => [e.name, e.startTime + e.duration]))"


class Measured:
    """Prints each measurement at once and collects the missed bounds."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def add(self, what: str, value: float, note: str = "") -> None:
        bound = BOUNDS.get(what)
        if bound is not None and value > bound:
            self.missed.append(f"{what}: {value:.3g}")
        print(
            f"{what:<44}{value:>10,.3f}{'' if bound is None else f'{bound:>8g}'}  {note}".rstrip(),
            flush=True,
        )


def make(url: str, passes: int) -> None:
    """Make a store with a long run, whose steps are 10 s apart and have metrics, and a run of many prompts."""
    with open_store(url) as store:
        store.register_prompts(*texts(PROMPTS))
        run = create(store, "long")
        fill(store, run, PROMPTS, passes=passes, a_step=A_STEP)
        fill(store, create(store, "pool"), POOL, passes=POOL_PASSES, a_step=POOL_STEP)
        names = ", ".join(
            f"'{name}', round(0.5 + (step * {i + 3} % 97) / 200.0, 6)"
            for i, name in enumerate(METRICS)
        )
        with store.database.transaction(write=True) as connection:
            connection.exec_driver_sql(
                f"""UPDATE dbb_step SET metrics = json_object({names}), generated = rollouts,
                    generated_tokens = 500 * rollouts, trained = rollouts, zero_variance = rollouts / 2,
                    informative = rollouts, rescued = rollouts / 2, skipped = 0, groups = prompts,
                    created_at = strftime('%Y-%m-%dT%H:%M:%fZ', '2026-01-01', '+' || (10 * step) || ' seconds')"""
            )


def plain_sql(path: Path) -> float:
    """Return the seconds that the driver alone takes to read every step's totals and metrics, the first view's data."""
    began = time.perf_counter()
    with sqlite3.connect(path) as connection:
        for _ in connection.execute("SELECT * FROM dbb_step WHERE run_id = 1 ORDER BY step"):
            pass
    return time.perf_counter() - began


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address.rstrip('/')}/api/{path}", timeout=120) as answer:
        return json.load(answer)


class Server:
    """Runs ``openrlhf-dbb serve`` as a user starts it."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "openrlhf_dbb", "serve", "--port", "0", "--store.url", url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address = re.search(r"http://\S+", self._process.stdout.readline())
        assert address is not None, "the server did not print its address"
        self.address = address[0]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def look(measured: Measured, url: str) -> None:
    """Measure first paint, history and updates of the long run."""
    sql = statistics.median(plain_sql(Path(url.removeprefix("sqlite:///"))) for _ in range(3))
    server, browser = Server(url), Browser()
    try:
        browser.open(f"{server.address}#view=curves&runs=1&run=1")
        paint = browser(RUNNING.format("paint"))["first-contentful-paint"] / 1000
        measured.add("first paint s", paint, f"{paint / sql:.2f} of the plain SQL, {sql:.3f} s")
        drawn = float(browser("document.documentElement.dataset.ready")) / 1000
        measured.add("all curves drawn s", drawn, f"{drawn / sql:.2f} of the plain SQL")
        updates(measured, url, browser)
        began = time.perf_counter()
        answer = ask(server.address, "runs/1/pool")
        measured.add("whole history read s", time.perf_counter() - began)
        browser.open(f"{server.address}#view=prompts&run=1")
        drawn = float(browser("document.documentElement.dataset.ready")) / 1000
        measured.add("table of prompts drawn s", drawn, f"{len(answer['id']):,} prompts")
        look_at_pool(measured, server.address, url, browser)
    finally:
        browser.close()
        server.close()


def updates(measured: Measured, url: str, browser: Browser) -> None:
    """Record steps while the page is open, and measure how late it draws them."""
    with open_store(url) as store:
        trainer = Trainer(store.claim_run(1), PROMPTS)
        lags = []
        for _ in range(12):
            rows = trainer.rows(A_STEP)
            trainer.run.record_step(trainer.step, rows)
            trainer.run.record_metrics(trainer.step, dict.fromkeys(METRICS, 0.5))
            lags.append(
                browser.until(f"Number(document.documentElement.dataset.step) >= {trainer.step}")
            )
        trainer.run.release()
    measured.add(
        "commit to drawn s",
        max(lags),
        f"the longest of {len(lags)}; median {statistics.median(lags):.2f}",
    )
    draws = browser("performance.getEntriesByName('update-draw').map((e) => e.duration)")
    measured.add(
        "drawing an update ms",
        max(draws),
        f"the longest of {len(draws)}; median {statistics.median(draws):.0f}",
    )
    whole = browser("performance.getEntriesByName('update-all').map((e) => e.duration)")
    measured.add(
        "asking and drawing ms", max(whole), f"the longest; median {statistics.median(whole):.0f}"
    )


MOVING = """(async () => {
    const canvas = document.querySelector("#pool"), box = canvas.getBoundingClientRect(), frames = [];
    for (let i = 0, last = await new Promise(requestAnimationFrame); i < 60; i++) {
        const [clientX, clientY] = [box.x + i / 60 * box.width, box.y + (i * 7 % 60) / 60 * box.height];
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
        const now = await new Promise(requestAnimationFrame);
        frames.push(now - last);
        last = now;
    }
    return frames;
})()"""


def look_at_pool(measured: Measured, address: str, url: str, browser: Browser) -> None:
    """Measure the picture of the run "pool": opened, pointed at, and drawn anew after a step."""
    browser.open(f"{address}#view=pool&run=2")
    drawn = float(browser("document.documentElement.dataset.ready")) / 1000
    size = len(ask(address, "runs/2/pool")["cells"]) / 1e6
    measured.add("pool drawn s", drawn, f"{POOL:,} prompts, {size:.1f} MB")
    frames = browser(MOVING)
    note = f"the median of {len(frames)}; longest {max(frames):.0f}"
    measured.add("pointing at the pool, ms a frame", statistics.median(frames), note)
    with open_store(url) as store:
        trainer = Trainer(store.claim_run(2), POOL)
        for _ in range(3):
            rows = trainer.rows(POOL_STEP)
            trainer.run.record_step(trainer.step, rows)
            browser.until(f"Number(document.documentElement.dataset.step) >= {trainer.step}")
        trainer.run.release()
    draws = browser("performance.getEntriesByName('update-draw').map((e) => e.duration)")
    measured.add(
        "drawing the pool ms",
        statistics.median(draws),
        f"the median of {len(draws)}; longest {max(draws):.0f}",
    )


def ask_as_pages_do(address: str, stop: Any, watching: Any) -> None:
    """Play ``CLIENTS`` pages that show the curves of run "fast": they ask while ``watching`` is set, until ``stop``."""

    def page() -> None:
        version = ""
        while not stop.is_set():
            if watching.wait(0.1):
                found = [run for run in ask(address, "state")["runs"] if run["name"] == "fast"]
                if found and found[0]["version"] != version:
                    version = found[0]["version"]
                    ask(address, f"runs/{found[0]['id']}/series")
                time.sleep(1)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for client in [pool.submit(page) for _ in range(CLIENTS)]:
            client.result()


def crowd(measured: Measured, url: str) -> None:
    """Measure the writer's time for a step, with clients and without, in turns."""
    server = Server(url)
    # In a process of their own: the writer shares no interpreter with them
    apart = multiprocessing.get_context("spawn")
    stop, watching = apart.Event(), apart.Event()
    clients = apart.Process(target=ask_as_pages_do, args=(server.address, stop, watching))
    clients.start()
    with open_store(url) as store:
        trainer = Trainer(create(store, "fast"), PROMPTS)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS):
            watched = turn % 2 == 1
            (watching.set if watched else watching.clear)()
            time.sleep(1)
            until = time.perf_counter() + TURN_S
            while time.perf_counter() < until:
                rows, due = trainer.rows(A_STEP), time.perf_counter() + 1 / STEPS_A_SECOND
                began = time.perf_counter()
                trainer.run.record_step(trainer.step, rows)
                times[watched].append(time.perf_counter() - began)
                time.sleep(max(0.0, due - time.perf_counter()))
        time.sleep(1)
        (run,) = (run for run in ask(server.address, "state")["runs"] if run["name"] == "fast")
        assert run["step"] == trainer.step, "a step is missing"
    stop.set()
    clients.join()
    assert clients.exitcode == 0, "a client failed"
    server.close()
    alone, beside = (statistics.median(each) for each in times)
    note = (
        f"{1000 * beside:.2f} over {1000 * alone:.2f} ms, {len(times[0])} and {len(times[1])} steps"
    )
    measured.add("step with clients / without", beside / alone, note)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    options = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("needs a Chromium; on Debian: apt-get install chromium")
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="dbb_watch_") as name:
        url = f"sqlite:///{name}/store.db"
        make(url, PASSES // 10 if options.quick else PASSES)
        print(f"{'':<44}{'':>10}{'bound':>8}")
        look(measured, url)
        crowd(measured, url)
    print(json.dumps({"missed": measured.missed}))
    return 1 if options.check and measured.missed else 0


if __name__ == "__main__":
    sys.exit(main())
