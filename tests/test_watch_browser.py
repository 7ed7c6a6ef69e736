"""The page about runs in a real browser, from a file and from a server: what it shows, and how it is used."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.storage import StepRows
from openrlhf_dbb.terminal import readable

HOSTILE = "<script>alert(1)</script></script><!-- <img src=x onerror=alert(2)> \x1b[2J\u202e&amp;"
VIEWS = ("pool", "curves", "runs", "usage", "prompts", "rollouts", "run")
STEP = "Number(document.documentElement.dataset.step)"


def texts(browser, selector):
    found = browser.page.locator(selector).all_text_contents()
    # Which keeps a number and its unit together
    return [each.replace("\u00a0", " ").strip() for each in found]


def text(browser, selector):
    (found,) = texts(browser, selector)
    return found


def until_text(browser, selector, start):
    browser.until(
        f"document.querySelector({json.dumps(selector)}).textContent.startsWith({json.dumps(start)})"
    )


@pytest.fixture(autouse=True)
def no_complaints(browser):
    yield
    assert browser.complaints == []


@pytest.fixture
def store(open_new):
    return open_new("sqlite")


@pytest.fixture
def write(fill):
    """Function: record a step, then its metrics."""

    def make(run, ids, step, successes, **more):
        fill.step(run, step, ids, successes, kept=fill.rollouts(ids, successes), **more)
        probed = {"probe/mse": 0, "probe/mse_point": 1}
        logged = {"entropy_loss": 1 / step, "plan/steps": 10, "group/other": step, "kl": 0} | probed
        run.record_metrics(step, logged)

    return make


@pytest.fixture
def written(tmp_path):
    """Function: the address of a report of a store's runs."""

    def make(store, *runs):
        path = tmp_path / "report.html"
        assert main(["report", *runs, "-o", str(path), "--store.url", store.url]) == 0
        return path.as_uri()

    return make


@pytest.fixture
def sixty(store, fill, write):
    """A store with a run of 60 prompts and 3 epochs, some of whose texts are hostile."""
    run = fill.run(store, model=HOSTILE, config={"seed": 7})
    questions = [f"Question {i}: what is {i} + {i}?" for i in range(58)] + [HOSTILE, "x" * 100_000]
    ids = store.register_prompts(questions, [str(2 * i) for i in range(60)])
    for step in range(1, 4):
        write(run, ids, step, np.arange(60) * step % 5)
    run.record_evaluation(3, "training", [fill.evaluation(ids[:2], [3, 2])], model="", config={})
    return store


def requested(browser):
    """The addresses that a page has asked for, without what follows #."""
    return {url.split("#")[0] for url in browser.requests}


UNNAMED = """[...document.querySelectorAll("button, input, select, a[href], svg[tabindex], canvas")]
    .filter((each) => each.getClientRects().length)
    .filter((each) => each.tabIndex < 0 && each.getAttribute("tabindex") !== "-1"
        || !(each.textContent.trim() || each.ariaLabel || each.labels?.length))
    .map((each) => each.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize(
    ("width", "dark", "background"),
    [(1280, False, "rgb(255, 255, 255)"), (390, True, "rgb(21, 23, 27)")],
)
def test_every_view_of_a_file_opens_without_a_complaint_or_a_request(
    browser, sixty, written, width, dark, background
):
    address = written(sixty)
    for view in VIEWS:
        browser.open(f"{address}#view={view}", width, dark=dark)
        assert browser.complaints == []
        assert requested(browser) == {address}
        title = text(browser, f"#tabs a[data-view={view}]")
        assert texts(browser, "#tabs [aria-current=page]") == [title]
        # Nothing sticks out of a phone
        assert browser("document.documentElement.scrollWidth") <= width
        assert browser('document.querySelectorAll("script").length') == 2
        assert texts(browser, "main img") == []
        assert browser(UNNAMED) == []
        assert browser("getComputedStyle(document.body).backgroundColor") == background


@pytest.fixture
def drawn(store, fill):
    """Three prompts: one is right in 3 steps, the second is drawn and wrong in the first, the third in the last."""
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 3))
    for step, rows, successes in ((1, [0, 1], [4, 0]), (2, [0], [4]), (3, [0, 2], [4, 2])):
        fill.step(run, step, ids[rows], successes)
    return run, ids


def drag(browser, across, *downs):
    """Press the left button on the picture at the first place, by shares of width and height; release at the last."""
    box = browser.page.locator("#pool").bounding_box()
    mouse = browser.page.mouse
    places = [
        (box["x"] + across * (box["width"] - 8), box["y"] + down * box["height"]) for down in downs
    ]
    mouse.move(*places[0])
    mouse.down()
    for place in places[1:]:
        mouse.move(*place)
    mouse.up()


CELLS = """(({ width, height }, context) => {
    const pixels = context.getImageData(0, 0, width, height).data;
    const centre = (k, size) => Math.floor((k + 0.5) / 3 * size);
    const at = (i) => 4 * (centre(Math.floor(i / 3), height) * width + centre(i % 3, width - 10));
    return [...Array(9).keys()].map((i) => [...pixels.slice(at(i), at(i) + 4)]);
})(document.querySelector("#pool"), document.querySelector("#pool").getContext("2d"))"""


def test_the_page_opens_on_a_picture_of_drawn_prompts_and_others(browser, store, drawn, written):
    browser.open(written(store))
    assert texts(browser, "#tabs [aria-current=page]") == ["Pool"]
    cells = browser(CELLS)
    opacity = np.array(cells)[:, 3].reshape(3, 3).tolist()
    # rows by the mean, 0.98, 0.5, 0.1: drawn is 255, not drawn 0.3 of it, not visited yet 0
    assert opacity == [[255, 255, 255], [0, 0, 255], [255, 76, 76]]
    # a mean of 0.9 is level 113 of 126: 0.794 of the way from the middle colour to that of 1
    assert cells[0][:3] == [237, 147, 52]


def test_the_last_step_s_shares_of_beliefs_and_of_states_are_read_out(
    browser, store, drawn, written
):
    browser.open(written(store))
    browser.until("document.querySelector('#state-shares .readout').textContent != ''")
    of_drawn = text(browser, "#beliefs-drawn .readout")
    assert "0.8\u20131 50.0 %" in of_drawn
    assert "not visited before 50.0 %" in of_drawn
    assert "0\u20130.2 100.0 %" in text(browser, "#beliefs-others .readout")
    of_states = text(browser, "#state-shares .readout")
    assert of_states.startswith("step 3: ")
    shares = dict(re.findall(r"([a-z ]+) ([0-9.]+) %", of_states.removeprefix("step 3:")))
    assert {name.strip(): float(share) for name, share in shares.items()} == {
        "mastered": 33.3,
        "learning": 33.3,
        "forgotten": 0.0,
        "never solved": 33.3,
    }


def test_a_prompt_of_the_picture_opens_by_the_mouse(browser, store, drawn, written):
    _, ids = drawn
    browser.open(written(store))
    drag(browser, 0.5, 0.9)
    browser.until("document.querySelector('dialog#prompt').open")
    assert text(browser, "#prompt-title") == f"Prompt {ids[1]}"


def test_a_prompt_of_the_picture_is_told_and_opens_by_the_keyboard(browser, store, drawn, written):
    _, ids = drawn
    browser.open(written(store))
    browser.page.focus("#pool")
    for key in ("ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp"):
        browser.page.keyboard.press(key)
    told = text(browser, "#pool-told")
    for piece in (f"Prompt {ids[0]}", "mastered", "step 2", "mean 0.96", "drawn"):
        assert piece in told
    browser.page.keyboard.press("Enter")
    browser.until(f"document.querySelector('#prompt-title').textContent == 'Prompt {ids[0]}'")


def test_numbers_and_rows_choose_the_prompts_of_the_picture(browser, sixty, written):
    browser.open(written(sixty))
    # S = i * step modulo 5: every fifth prompt is never solved
    number = "#states a[href*='state=3']"
    assert (
        text(browser, f"{number} strong") == "never solved" and text(browser, f"{number} b") == "12"
    )
    browser.page.click(number)
    until_text(browser, "#pool-title", "12 of 60 prompts")
    browser.page.click("#pool-all")
    until_text(browser, "#pool-title", "60 prompts")
    drag(browser, 0.5, 0.26, 0.4, 0.74)
    until_text(browser, "#pool-title", "30 of 60 prompts")  # rows 15 to 44
    assert browser("location.hash").endswith("rows=15-45") and not browser(
        "document.querySelector('dialog').open"
    )


def test_the_page_says_what_changed_since_the_last_visit(browser, store, fill, drawn, written):
    run, ids = drawn
    browser.open(written(store))
    assert (
        text(browser, "#states a[href*='state=0'] span:not(.note)") == "33.3 %"
        and text(browser, "#pool-note") == ""
    )
    browser("""Object.keys(localStorage).forEach((key) => {
        const kept = JSON.parse(localStorage[key]);
        kept.seen.at -= 2 * 3_600_000;
        localStorage[key] = JSON.stringify(kept);
    })""")
    for step in (4, 5):
        fill.step(run, step, ids[2:], [4])
    for _ in range(2):  # a page that is opened again at once is the same visit
        browser.open(written(store))
        assert text(browser, "#states a[href*='state=0'] span:not(.note)") == "+1 \u00b7 66.7 %"
        assert (
            text(browser, "#pool-note") == "Changes are since your last visit, 2.0 h ago at step 3."
        )


def test_curves_say_their_values(browser, sixty, written):
    browser.open(f"{written(sixty)}#view=curves&smooth=0", height=3000)
    charts = browser(
        '[...document.querySelectorAll("#charts figure")].map((each) => each.dataset.chart)'
    )
    # Those of which the run knows nothing are left out: the clip fraction, and a KL of 0, which has no reference.
    assert charts == ["held-out", "reward", "length", "entropy", "zero-variance", "probes"]
    browser.until(
        """document.querySelectorAll("#charts [data-chart=probes] .curves path").length == 2"""
    )
    # 3 of 4 and 2 of 4
    assert text(browser, "[data-chart=held-out] .readout") == "step 3: 62.5 %"
    # S = 3i modulo 5 is 0 or 4 for 24 of 60; all of these were given an advantage
    assert (
        text(browser, "[data-chart=zero-variance] .readout")
        == "step 3: all 40.0 %, those given an advantage 40.0 %"
    )
    # S = i, 2i and 3i modulo 5, each 120 in all, of 240
    browser.page.focus("[data-chart=entropy] > svg")
    assert text(browser, "[data-chart=reward] .readout").startswith("step 3: 0.5")
    browser.page.keyboard.press("ArrowLeft")
    assert text(browser, "[data-chart=entropy] .readout").startswith("step 2: 0.5")
    browser.page.keyboard.press("Home")
    assert text(browser, "[data-chart=entropy] .readout").startswith("step 1: 1")
    browser.page.click("#others summary")
    browser.until("document.querySelectorAll('#other-charts figure').length == 1")


def test_search_filter_and_sorting_are_in_the_address(browser, sixty, written):
    address = written(sixty)
    browser.open(f"{address}#view=prompts")
    rows = "#prompts tbody tr"
    first = "#prompts tbody tr:first-child td:first-child"
    assert text(browser, "#hits") == "60 of 60 prompts" and len(texts(browser, rows)) == 60
    browser.page.fill("#search", "WHAT IS 12 +")
    until_text(browser, "#hits", "1 of 60 prompts")
    assert text(browser, "#prompts tbody td:last-child") == "Question 12: what is 12 + 12?"
    browser.page.fill("#search", "")
    until_text(browser, "#hits", "60 of 60 prompts")
    ids = sorted(int(each) for (each,) in sixty.query("SELECT prompt_id FROM prompts"))
    browser.page.click("#prompts thead button")
    assert browser('document.querySelector("#prompts th").ariaSort') == "descending"
    assert text(browser, first) == str(ids[-1])
    browser.open(browser("location.href"))
    assert text(browser, first) == str(ids[-1])
    # S = i * step mod 5: every fifth prompt is never solved
    browser.page.select_option("#state", "3")
    until_text(browser, "#hits", "12 of 60 prompts")


def test_a_prompt_its_band_and_what_was_written_then(browser, sixty, written):
    browser.open(f"{written(sixty)}#view=prompts&q=onerror")
    browser.page.focus("#prompts tbody a")
    browser.page.keyboard.press("Enter")
    browser.until('document.querySelectorAll("#responses .card").length == 2')
    assert browser('document.querySelector("dialog#prompt").open')
    assert text(browser, "#prompt-text pre").startswith(
        "<script>alert(1)</script></script><!-- <img src=x onerror"
    )
    browser.until(
        'document.querySelectorAll("#prompt-chart .bands .band").length == 1'
    )  # drawn once it is in sight
    # Prompt 58, S = 3, 1, 4: alpha 3.5, 2.75, 5.375; beta 1.5, 3.75, 1.875; two rollouts of each visit are kept.
    cells = """[...document.querySelectorAll("#visits tbody tr")]
               .map((row) => [0, 1, 2, 3, 4, 5, 8].map((cell) => row.cells[cell].textContent))"""
    assert browser(cells) == [
        ["1", "4", "3", "3.5", "1.5", "0.700", "2"],
        ["2", "4", "1", "2.75", "3.75", "0.423", "2"],
        ["3", "4", "4", "5.375", "1.875", "0.741", "2"],
    ]
    kinds = '[...document.querySelectorAll("#responses .card")].map((card) => card.dataset.kind)'
    assert browser(kinds) == ["right", "right"]  # of the last visit
    browser.page.click("#visits tbody tr:nth-child(2) button")
    browser.until(f"{kinds}.join() == 'right,wrong'")
    assert "visit=2" in browser("location.hash")
    verdict = text(browser, "#responses .wrong .verdict")
    response = text(browser, "#responses .wrong pre")
    assert (
        "wrong" in verdict
        and "advantage -0.50" in verdict
        and "10 tokens" in verdict
        and response == "answer 1"
    )
    browser.page.keyboard.press("Escape")
    browser.until("!document.querySelector('dialog#prompt').open")


def test_the_page_says_where_the_rollouts_went(browser, sixty, written):
    browser.open(f"{written(sixty)}#view=usage")
    # S = i * step modulo 5 is 0 or 4 for 24 of 60 prompts in each of 3 steps
    assert texts(browser, "#usage-numbers dd") == [
        "108 of 180", "72 of 72", "6.667", "67", "720", "720 (100.0 %)", "0 (0.0 %)", "180", "7200",
    ]  # fmt: skip
    assert texts(browser, "#usage-parts dt") == [
        "mixed: 432 (60.0 %)", "zero variance, given an advantage: 288 (40.0 %)",
        "no advantage: 0 (0.0 %)", "filtered out: 0 (0.0 %)",
    ]  # fmt: skip


def test_a_log_without_advantages_claims_none(browser, store, written, tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [
        {"step": 1, "prompt": prompt, "reward": reward}
        for prompt, reward in (("p", 1), ("p", 1), ("q", 0), ("q", 1))
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["import", str(log), "--run_name", "log", "--store.url", store.url]) == 0
    page = written(store)
    browser.open(f"{page}#view=usage")
    assert "does not tell the advantages" in text(browser, "#usage-note")
    # mixed groups, rollouts for one, rollouts, skipped; nothing of what was trained on
    assert texts(browser, "#usage-numbers dd") == ["1 of 2", "4", "4", "0"]
    assert browser("document.querySelector('#usage-parts').hidden")
    browser.open(f"{page}#view=rollouts")
    assert all("advantage not known" in verdict for verdict in texts(browser, ".card .verdict"))


def test_three_runs_over_each_other_and_two_of_them_compared_by_numbers_that_are_not_smoothed(
    browser, store, fill, write, written
):
    ids = fill.prompts(store, 4)
    held_out = store.register_prompts([f"held out {i}" for i in range(10)], [""] * 10)
    for name, steps, more in (("first", 3, 0), ("second", 3, [1] * 9 + [2]), ("third", 6, 0)):
        run = fill.run(store, name)
        for step in range(1, steps + 1):
            write(run, ids, step, [step % 5, 1, 2, 3])
        rows = [fill.evaluation(held_out, np.array([2, 1] * 5) + more)]
        run.record_evaluation(steps, "training", rows, model="", config={})
    address = written(store, "first", "second", "third")
    browser.open(f"{address}#view=curves&x=rollouts&smooth=0.9")
    browser.until('document.querySelectorAll("[data-chart=reward] .curves path.curve").length == 3')
    assert [each.split()[0] for each in texts(browser, "#legend li")] == [
        "third",
        "second",
        "first",
    ]
    browser.page.focus("[data-chart=reward] > svg")
    browser.page.keyboard.press("Home")
    assert text(browser, "[data-chart=reward] .readout").startswith("16 rollouts")
    browser.page.select_option("#axis", "steps")
    browser.page.focus("[data-chart=reward] > svg")
    browser.page.keyboard.press("Home")
    until_text(browser, "[data-chart=reward] .readout", "step 1:")
    browser.open(f"{address}#view=runs&smooth=0.9")
    browser.page.click("#runs tbody tr:first-child input[type=checkbox]")
    browser.page.click("#tabs a[data-view=curves]")
    browser.until("document.querySelectorAll('#legend li').length == 2")
    said = text(browser, "#comparison")
    assert re.match(r"Held-out accuracy, second .* minus first .*: \+27\.5 points", said)
    for piece in ("the second is higher", "One run of each", "10 prompts \u00d7 4 samples"):
        assert piece in said
    told = "document.querySelector('[data-chart=reward] .readout').textContent"
    browser.until(f"{told} == 'step 3: second 0.5625; first 0.5625'")  # 9 of 16


@pytest.fixture
def chat(store, fill):
    """A run of an estimator without history; texts and numbers of its prompts, which are a chat model's."""
    run = fill.run(store, "point", fields=())
    shown = [
        f"<|im_start|>user\nWhat is {i}?<|im_end|>\n<|im_start|>assistant\n" for i in (1, 2, 3)
    ]
    return run, shown, np.sort(store.register_prompts(shown, [""] * 3))


def record_means(run, ids):
    """Record one step without any column of an estimator's state."""
    none = np.empty((3, 0))
    mean = np.array([0.25, 0.5, 1.0])
    samples = np.full(3, 4)
    unknown = np.full(3, -1)
    run.record_step(
        1, StepRows(ids, samples, 4 * mean, mean, mean * (1 - mean), none, none, unknown)
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_every_view_of_a_run_of_no_step_and_of_one_step_says_something(
    browser, store, chat, written, steps
):
    run, _, ids = chat
    if steps:
        record_means(run, ids)
    address = written(store)
    for view in VIEWS:
        browser.open(f"{address}#view={view}")
        assert browser.complaints == []
        # Something is said, never an empty chart
        assert len(text(browser, f"#view-{view}").strip()) > 20


def test_a_chat_model_s_prompts_are_shown_without_their_frame_and_without_a_history(
    browser, store, chat, written
):
    run, shown, ids = chat
    record_means(run, ids)
    browser.open(f"{written(store)}#view=prompts&prompt={ids[1]}")
    assert texts(browser, "#prompts tbody td:last-child") == [f"What is {i}?" for i in (1, 2, 3)]
    assert text(browser, "#prompt-facts") == "learning, group mean 0.500, 1 visit"
    assert text(browser, "#prompt-text pre") == shown[1].strip()
    note = text(browser, "#prompt-note")
    assert "no history" in note
    assert "group mean" in note


def test_a_run_whose_scores_are_minus_1_and_1_has_no_states(browser, store, fill, written):
    run = fill.run(store, estimator="point")
    ids = fill.prompts(store, 2)
    rows = fill.rows(run, ids, [0, 4])
    # Half of the first prompt's four are right, and all of the second's.
    run.record_step(1, replace(rows, mean=np.array([0.0, 1.0]), variance=np.array([4 / 3, 0.0])))
    address = written(store)
    browser.open(address)
    assert text(browser, "#pool-note").startswith(
        "The scores of this run are not known to lie in [0, 1]"
    )
    for selector in ("#states", "#state-shares"):
        assert not browser.page.locator(selector).is_visible()
    assert browser.page.locator("#beliefs-drawn").is_visible()
    browser.open(f"{address}#view=prompts&state=3")  # an address that was sent for another run
    assert texts(browser, "#prompts th") == ["id \u25b2", "mean", "change", "visits", "text"]
    assert (
        text(browser, "#hits") == "2 of 2 prompts"
        and not browser.page.locator("#state").is_visible()
    )
    browser.page.click("#prompts tbody a >> nth=0")
    until_text(browser, "#prompt-facts", "posterior mean 0.1")


def test_a_damaged_run_says_why_and_hides_no_other(browser, store, fill, write, serve):
    for name in ("good", "bad"):
        run = fill.run(store, name)
        ids = fill.prompts(store, 2)
        write(run, ids, 1, [1, 2])
        run.finish()
    number = run.record.run_id
    with store.database.transaction(write=True) as connection:
        connection.exec_driver_sql(f"UPDATE dbb_step SET metrics = 'x' WHERE run_id = {number}")
    address = serve(store.url).url
    browser.open(f"{address}#view=runs")
    notes = texts(browser, "#runs tbody .problem")
    assert len(notes) == 1 and "run 'bad'" in notes[0] and "metrics" in notes[0]
    browser.open(f"{address}#view=usage&run={number}")
    until_text(browser, "#problem", "This could not be read: ")
    assert "run 'bad'" in text(browser, "#problem")
    browser.complaints.clear()  # the browser's own about the answer 503
    browser.page.select_option("#run-choice", label="good (finished)")
    browser.until("document.querySelector('#problem').hidden")
    assert texts(browser, "#usage-parts dt")[0] == "mixed: 8 (100.0 %)"
    browser.complaints.clear()


def test_times_carry_their_zone(browser, store, fill, drawn, written):
    run, _ = drawn
    run.finish()
    browser.open(f"{written(store)}#view=run")
    assert re.fullmatch(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text(browser, "#live"))
    (event,) = texts(browser, "#events li")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC finish", event)


def test_an_open_page_gains_steps_runs_and_what_is_written(browser, store, fill, write, serve):
    browser.open(serve(store.url).url)
    assert text(browser, "#no-runs").startswith("No runs yet in ")
    run = fill.run(store)
    ids = fill.prompts(store, 4)
    for step in range(1, 6):
        write(run, ids, step, [1, 2, 3, step % 5])
        waited = browser.until(f"{STEP} >= {step}")
        assert waited < 2 + 0.5  # a moment for the browser to say so
    assert text(browser, "#pool-title").startswith("4 prompts: ")
    browser.page.click("#tabs a[data-view=curves]")
    browser.until(
        'document.querySelectorAll("[data-chart=entropy] .curves path.curve").length == 1'
    )
    other = fill.run(store, "other")
    write(other, ids, 1, [1, 2, 3, 4])
    browser.until('document.querySelectorAll("[data-chart=reward] .curves path.curve").length == 2')
    browser.page.click("#tabs a[data-view=rollouts]")
    browser.until('document.querySelectorAll("#groups .card").length == 8')
    write(other, ids, 2, [0, 0, 0, 0])
    until_text(browser, "#rollouts-note", "Step 2: 8 kept rollouts, 8 wrong")
    assert len(browser("performance.getEntriesByName('update-draw')")) > 0
    assert {url.split("/")[2] for url in browser.requests} == {browser("location.host")}


def test_a_server_that_is_killed_and_started_again(browser, store, fill, write, serve):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    write(run, ids, 1, [1, 2])
    server = serve(store.url)
    browser.open(f"{server.url}#view=curves")
    server.process.kill()
    browser.until("document.querySelector('#live').textContent.includes('connection lost')")
    assert len(texts(browser, "[data-chart=reward] .dots circle")) == 1  # what was drawn stays
    write(run, ids, 2, [1, 2])
    serve(store.url, "--port", str(server.port))
    browser.until(f"{STEP} == 2")
    assert text(browser, "#live").startswith("live, step 2")
    run.finish()
    until_text(browser, "#live", "no run is being written; last write ")
    browser.complaints.clear()  # of the server that was away


GROUPS = ("mixed", "all right", "all wrong", "all alike", "unverified", "filtered out")


@pytest.fixture
def grouped(store, fill):
    """A run whose second step has a group of each kind in this order, four rollouts each, then a mixed one.

    Of the last group two rollouts are kept, both of them right.
    """
    run = fill.run(store)
    questions = [HOSTILE, *(f"Question {i}" for i in range(6))]
    ids = np.sort(store.register_prompts(questions, [HOSTILE, *"123456"]))
    half = [0.5] * 4
    rewards = np.array([[1, 0, 0, 0], [1] * 4, [0] * 4, half, [np.nan] * 4, [1] * 4, [1, 1, 0, 0]])
    kept = np.arange(28) < 26
    flat = rewards.ravel()[kept]
    baseline = np.where(np.isnan(flat) | (np.repeat(ids, 4)[kept] == ids[5]), np.nan, 0.25)
    trained = np.where(np.isnan(baseline), 0.0, 2 * (flat - 0.25) / 0.5)
    written = [f"{HOSTILE}\n\tanswer  {i}" for i in range(26)]
    rows = fill.rollouts(ids, [0] * 7, samples=4)
    columns = {}
    for name in ("prompt_ids", "sample", "length", "truncated", "log_prob"):
        columns[name] = getattr(rows, name)[kept]
    rows = replace(
        rows, **columns, reward=flat, score=flat, advantage=np.nan_to_num(trained), baseline=baseline,
        scale=np.where(np.isnan(baseline), np.nan, 0.5), weight=np.full(26, 2.0), text=written, read=[HOSTILE] * 26,
    )  # fmt: skip
    verified = np.array([0, 1, 2, 3, 5, 6])
    fill.step(run, 1, ids[:2], [1, 2], kept=fill.rollouts(ids[:2], [1, 2]))
    usage = fill.usage(ids, [0] * 7, skipped=3, trained=24, informative=24, rescued=0)
    sums = rewards[verified].sum(axis=1)
    fill.step(run, 2, ids[verified], sums, kept=rows, usage=usage, form="plain")
    return store, ids


def shown_groups(browser):
    return texts(browser, "#groups .badge")


FIRST = "#groups .group:first-child"


@pytest.fixture
def side_by_side(browser, grouped, written):
    """The page with the groups of the last step; the numbers of their prompts."""
    store, ids = grouped
    browser.open(f"{written(store)}#view=rollouts")
    assert shown_groups(browser) == [*GROUPS, "mixed"]
    return ids


def test_a_groups_wrong_rollouts_are_beside_the_right_ones(browser, side_by_side):
    assert texts(browser, f"{FIRST} .side")[0].startswith("\u2713 right")
    sides = f'[...document.querySelectorAll("{FIRST} .side")]'
    places = browser(f"{sides}.map((each) => each.getBoundingClientRect().top)")
    assert len(places) == 2
    assert places[0] == places[1]
    pre = browser(f"""getComputedStyle(document.querySelector("{FIRST} pre")).whiteSpace""")
    assert pre == "pre-wrap"
    assert texts(browser, f"{FIRST} pre")[0].endswith("\n\tanswer  0")
    assert texts(browser, "main img") == []


def test_a_group_has_the_arithmetic_of_its_advantages_and_its_posterior(browser, side_by_side):
    sums = texts(browser, f"{FIRST} .sum")
    assert sums[0].endswith(" 2 * (1 - 0.25) / 0.5 = 3")
    assert sums[1].endswith(f" {readable(HOSTILE)}")
    assert sums[2].endswith(" 2 * (0 - 0.25) / 0.5 = -1")
    # Beta(1, 1), one of four right, then one of four right: 1.5 of 5, then 1.75 of 6.5.
    assert "posterior mean 0.300 \u2192 0.269 (90 %: 0.0" in text(browser, f"{FIRST} .label")


def test_a_group_without_advantages_says_why(browser, side_by_side):
    unverified = text(browser, "[data-group=unverified] .sum >> nth=0")
    assert "could not be verified" in unverified
    assert "not trained on" in text(browser, "[data-group=filtered] .sum >> nth=0")


def test_rollouts_that_are_not_kept_and_prompts_without_rollouts_are_counted(browser, side_by_side):
    assert "2 right; 2 more not kept" in text(browser, "#groups .group:last-child h2")
    note = text(browser, "#rollouts-note")
    for piece in ("28 were generated", "4 were filtered out", "3 prompts were skipped"):
        assert piece in note


def test_a_prompts_visit_shows_its_group(browser, grouped, written):
    store, ids = grouped
    browser.open(f"{written(store)}#view=rollouts&prompt={ids[0]}&visit=2")
    browser.until('document.querySelectorAll("#responses .card").length == 4')
    assert text(browser, "#group-facts").startswith("mixed posterior mean 0.300 \u2192 0.269")
    assert len(texts(browser, "#visits tbody tr")) == 2
    assert len(texts(browser, "#responses .side")) == 2
    assert texts(browser, "main img") == []


def until_groups(browser, count):
    browser.until(f"document.querySelectorAll('#groups .group').length == {count}")


def test_bars_of_rewards_have_their_counts(browser, side_by_side):
    names = '[...document.querySelectorAll("#rewards button")].map((each) => each.ariaLabel)'
    assert browser(names) == [
        "Reward 0: 7 rollouts",
        "Reward 0.5: 4 rollouts",
        "Reward 1: 11 rollouts",
        "Reward none: 4 rollouts",
    ]


def test_a_bar_of_rewards_and_a_kind_of_group_are_filters_in_the_address(browser, side_by_side):
    browser.page.click("#rewards button >> nth=0")
    until_text(browser, "#rollout-hits", "2 of 7 groups, 7 of 26 rollouts")
    assert shown_groups(browser) == ["mixed", "all wrong"]
    assert "reward=0" in browser("location.hash")
    first_bar = browser.page.locator("#rewards button").first
    assert first_bar.get_attribute("aria-pressed") == "true"
    browser.page.select_option("#group", "wrong")
    until_text(browser, "#rollout-hits", "1 of 7 groups, 4 of 26 rollouts")
    chosen = browser("location.href")
    browser.page.go_back()
    until_text(browser, "#rollout-hits", "2 of 7 groups")
    browser.page.go_back()
    browser.until("document.querySelector('#rollout-hits').textContent == ''")
    assert len(shown_groups(browser)) == 7
    browser.open(chosen)  # as it was sent to somebody
    assert shown_groups(browser) == ["all wrong"]
    assert browser("document.querySelector('#group').value") == "wrong"
    browser.page.click("#show-all")
    until_groups(browser, 7)


def test_each_kind_of_group_can_be_shown_alone(browser, side_by_side):
    counts = {"mixed": 2, "right": 1, "alike": 1, "unverified": 1, "filtered": 1}
    for kind, count in counts.items():
        browser.page.select_option("#group", kind)
        until_groups(browser, count)
        assert browser.page.locator(f"#groups .group[data-group={kind}]").count() == count


@pytest.mark.parametrize(
    "odd", ["reward=abc", "reward=1,", "group=nothing", "reward=%3Cscript%3E", "show=odd"]
)
def test_a_filter_that_is_no_filter_shows_no_group_and_the_way_back(browser, grouped, written, odd):
    store, _ = grouped
    browser.open(f"{written(store)}#view=rollouts&{odd}")
    assert shown_groups(browser) == []
    assert browser.page.locator("#show-all").is_visible()


def test_rewards_of_many_values_are_in_ten_bars_that_hold_each_rollout_once(
    browser, store, fill, written
):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    rewards = np.array([-1.0, *np.arange(1, 24) / 12, 2.0])
    rows = fill.rollouts(ids, [0], samples=25)
    fill.step(run, 1, ids, [4], 25, kept=replace(rows, reward=rewards, score=rewards))
    browser.open(f"{written(store)}#view=rollouts")
    counts = [int(each) for each in texts(browser, "#rewards .count")]
    # Of a width of 0.3 from -1 on: -1, nothing up to -0.1, then 1/12 is in -0.1 to 0.2, and so on.
    assert len(counts) == 10 and sum(counts) == 25 and counts[:4] == [1, 0, 0, 2]
    for bar in (0, 3, 9):
        browser.page.click(f"#rewards button >> nth={bar}")
        until_text(browser, "#rollout-hits", f"1 of 1 group, {counts[bar]} of 25 rollouts")
    assert counts[9] == 4  # 1.7 to 2: 21/12, 22/12, 23/12 and 2


def test_from_a_point_of_a_curve_to_the_rollouts_of_its_step(browser, sixty, written):
    address = written(sixty)
    browser.open(f"{address}#view=curves", height=1500)
    chart = "[data-chart=reward] > svg"
    for keys, step in ((["Enter"], 3), (["Home", "ArrowRight", "Enter"], 2)):
        browser.page.focus(chart)
        for key in keys:
            browser.page.keyboard.press(key)
        until_text(browser, "#rollouts-note", f"Step {step}: 120 kept rollouts")
        browser.page.go_back()
        browser.until("!document.querySelector('#view-curves').hidden")
    box = browser.page.locator(chart).bounding_box()
    browser.page.mouse.click(box["x"] + box["width"] - 12, box["y"] + 60)
    until_text(browser, "#rollouts-note", "Step 3: 120 kept rollouts")
    assert browser("document.querySelector('#later-step').disabled")
    browser.page.click("#earlier-step")
    until_text(browser, "#rollouts-note", "Step 2: 120 kept rollouts")
    browser.page.click("#later-step")
    until_text(browser, "#rollouts-note", "Step 3: 120 kept rollouts")
    for _ in range(3):
        browser.page.go_back()
    browser.until("!document.querySelector('#view-curves').hidden")
    mouse = browser.page.mouse
    mouse.move(box["x"] + 100, box["y"] + 60)
    mouse.down()
    mouse.move(box["x"] + 300, box["y"] + 60, steps=5)
    mouse.up()
    browser.until("location.hash.includes('from=')")  # a drag zooms, and opens nothing
    assert not browser("document.querySelector('#view-curves').hidden")


def test_of_several_curves_the_nearest_or_the_chosen_one_is_opened(
    browser, store, fill, write, written
):
    ids = fill.prompts(store, 2)
    for name, right in (("low", [0, 0]), ("high", [4, 4])):
        run = fill.run(store, name)
        for step in (1, 2):
            write(run, ids, step, right)
    browser.open(f"{written(store, 'low', 'high')}#view=curves&smooth=0", height=1500)
    chart = "[data-chart=reward] > svg"
    for top, name in ((0.05, "high"), (0.8, "low")):
        box = browser.page.locator(chart).bounding_box()
        browser.page.mouse.click(box["x"] + box["width"] - 14, box["y"] + top * box["height"])
        browser.until(
            f"document.querySelector('#run-choice').selectedOptions[0].textContent.startsWith('{name}')"
        )
        until_text(browser, "#rollouts-note", "Step 2: 4 kept rollouts")
        browser.page.go_back()
        browser.until("!document.querySelector('#view-curves').hidden")
    browser.page.focus(chart)
    for key in ("Home", "ArrowDown"):
        browser.page.keyboard.press(key)
    chosen = text(browser, "[data-chart=reward] .readout").rpartition("Enter opens ")[2]
    browser.page.keyboard.press("Enter")
    browser.until(
        f"document.querySelector('#run-choice').selectedOptions[0].textContent.startsWith('{chosen} ')"
    )


def test_groups_are_walked_by_keys(browser, grouped, written):
    store, ids = grouped
    browser.open(f"{written(store)}#view=rollouts")
    press = browser.page.keyboard.press
    press("/")
    assert browser("document.activeElement.id") == "group"
    browser("document.activeElement.blur()")
    focused = "document.activeElement.textContent"
    for key, at in (("ArrowDown", 0), ("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1)):
        press(key)
        assert browser(focused) == f"Prompt {ids[at]}"
    outline = browser("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press("Enter")
    browser.until("document.querySelector('dialog#prompt').open")
    for key, at in (
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("ArrowLeft", 1),
        ("ArrowLeft", 0),
        ("ArrowLeft", 0),
    ):
        press(key)
        until_text(browser, "#prompt-title", f"Prompt {ids[at]}")
    assert browser("document.querySelector('#earlier-group').disabled")
    browser.page.click("#later-group")
    until_text(browser, "#prompt-title", f"Prompt {ids[1]}")
    press("Escape")
    browser.until("!document.querySelector('dialog#prompt').open")
    browser.until(
        "!location.hash.includes('prompt=')"
    )  # the dialog tells that it has closed a little later
    assert browser(focused) == f"Prompt {ids[1]}"
    browser.page.go_back()
    browser.until("document.querySelector('dialog#prompt').open")
    # In the other views arrows and the slash stay what they are.
    browser.open(f"{browser('location.href').split('#')[0]}#view=prompts")
    press("/")
    assert browser("document.activeElement.id") == "search"
    press("/")
    assert browser("document.activeElement.value") == "/"


def test_ten_ask_and_one_looks_while_a_training_writes(browser, store, fill, write, serve):
    run = fill.run(store)
    ids = fill.prompts(store, 8)
    write(run, ids, 1, np.arange(8) % 5)
    server = serve(store.url)
    base = f"runs/{run.record.run_id}"
    done = threading.Event()

    def client(number):
        asked = 0
        while not done.is_set():
            step = server.ask()["runs"][0]["step"]
            for path in (
                "series",
                "rollouts/latest",
                f"rollouts/{max(1, step - number)}",
                f"prompts/{ids[0]}",
            ):
                server.ask(f"{base}/{path}")  # the status is 200
                asked += 1
        return asked

    def training():
        for step in range(2, 41):
            write(run, ids, step, (np.arange(8) + step) % 5)

    with ThreadPoolExecutor(11) as pool:
        clients = [pool.submit(client, number) for number in range(10)]
        try:
            browser.open(f"{server.url}#view=rollouts")
            trained = pool.submit(training)
            while not trained.done():
                browser.page.click("#rewards button >> nth=0")
                browser.page.click("#groups h2 a >> nth=0")
                browser.until("document.querySelectorAll('#responses .card').length > 0")
                browser.page.keyboard.press("ArrowRight")
                browser.page.keyboard.press("Escape")
                browser.until("!document.querySelector('dialog#prompt').open")
                browser.page.click("#tabs a[data-view=rollouts]")
            trained.result()
        finally:
            done.set()
    assert all(ended.result() for ended in clients)
    browser.until(f"{STEP} == 40")
    until_text(browser, "#rollouts-note", "Step 40: 16 kept rollouts")
    assert browser("document.querySelector('#problem').hidden")
    assert server.end()[:2] == (0, "")


def test_a_group_of_which_no_verified_rollout_is_kept(browser, store, fill, written):
    run = fill.run(store)
    ids = np.sort(fill.prompts(store, 2))
    rows = fill.rollouts(ids, [1, 1])
    missing = np.array([np.nan, np.nan, 1, 0])
    fill.step(run, 1, ids, [2, 2], kept=replace(rows, reward=missing, score=missing), form="plain")
    browser.open(f"{written(store)}#view=rollouts")
    assert shown_groups(browser) == ["not known", "mixed"]
    assert texts(browser, "#groups .group:last-child .sum") == [
        "Advantage: (1 - 0.5) / 1 = 0.5", "Advantage: (0 - 0.5) / 1 = -0.5",
    ]  # fmt: skip


def test_what_is_shown_of_a_step_that_was_rolled_back_is_replaced(browser, store, fill, serve):
    run = fill.run(store)
    ids = fill.prompts(store, 1)
    rows = fill.rollouts(ids, [1])
    for step in (1, 2, 3):
        fill.step(run, step, ids, [1], kept=replace(rows, text=[f"old {step}", "old"]))
    browser.open(f"{serve(store.url).url}#view=rollouts&step=2")
    assert texts(browser, "#groups pre") == ["old 2", "old"]
    run.roll_back(1)
    browser.until(
        f"{STEP} >= 0 && document.querySelector('#run-line').textContent.includes('step 1')"
    )
    fill.step(run, 2, ids, [1], kept=replace(rows, text=["new 2", "new"]))
    browser.until("document.querySelector('#groups pre')?.textContent == 'new 2'")
