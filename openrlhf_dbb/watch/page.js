// ---- the head, the table of runs, and the loop that keeps the page up to date

const POLL_MS = 1000, RETRY_MS = 2000;
let runs = [], shownState = null, arrived = 0, lost = null, refreshTurn = 0;

const theRun = () => runs.find((run) => String(run.id) === at.run) ?? runs[0];
const sinceWrite = (run) => run.age_s + (isLive ? (performance.now() - arrived) / 1000 : 0);
const about = (run) => [run.method || run.estimator, run.model, run.dataset].filter(Boolean).join(" \u00b7 ");
const view = () => VIEWS[at.view];

const MARKS = { running: "\u25cf", stale: "\u26a0", finished: "\u2713" };
const box = () => element("label", { class: "tick" }, element("input", { type: "checkbox" }), element("span"));
const RUN_COLUMNS = [
  { name: "draw", left: true, make: box, update(node, run) {
    const [field, mark] = node.children, drawn = drawnRuns(), slot = drawn.indexOf(run);
    field.onchange = () => tick(run.id, field.checked);
    field.checked = drawn.includes(run);
    field.disabled = !field.checked && drawn.length >= MOST_RUNS;
    setAttributes(field, { "aria-label": `Draw ${run.name}` });
    if (mark.dataset.slot === String(slot)) return;
    mark.dataset.slot = slot;
    mark.replaceChildren(...slot < 0 ? [] : [lineMark(slot)()]);
  } },
  { name: "run", left: true, make: () => element("div", {}, element("a", { dir: "auto" }), element("div", { class: "note" })), update(node, run) {
    setText(node.firstChild, run.name);
    setAttributes(node.firstChild, { href: viewHash("run", { run: run.id }) });
    setText(node.lastChild, run.error ?? about(run));
    setAttributes(node.lastChild, { class: run.error ? "problem" : "note" });
  } },
  { name: "state", left: true, make: () => element("span"), update(node, run) {
    setAttributes(node, { class: `is-${run.state}`, title: run.state === "stale" ? "It is not finished, but its process no longer writes." : null });
    return `${MARKS[run.state] ?? ""} ${run.state}`;
  } },
  { name: "last write", update: (_, run) => isNumber(run.age_s) ? `${duration(sinceWrite(run))} ago` : "-" },
  { name: "held-out accuracy", update: (_, run) => heldOutText(run.held_out) },
  { name: "reward", update: (_, run) => fixed(run.reward) },
  { name: "step", update: (_, run) => whole(run.step ?? 0) + (isNumber(run.planned) ? ` / ${whole(run.planned)}` : "") },
  { name: "rollouts", update: (_, run) => whole(run.rollouts) },
];

VIEWS.runs = {
  needs: () => [],
  draw() {
    drawTable(byId("runs"), RUN_COLUMNS, runs, (run) => run.id);
    return Math.max(0, ...runs.map((run) => run.step ?? 0));
  },
};

function heldOutText(held) {
  if (!held) return "-";
  return (held.start_step === held.last_step ? "" : `${percent(held.start)} \u2192 `) + percent(held.last);
}

function tick(id, checked) {
  const ids = drawnRuns().map((run) => run.id).filter((each) => each !== id);
  go({ runs: [...ids, ...(checked ? [id] : [])].join(",") }, { replace: true });
}

// ---- the head

function liveText() {
  const readable = runs.filter((run) => isNumber(run.age_s)), written = readable.filter((run) => run.state === "running");
  const newest = (written.length ? written : readable).reduce((best, run) => best && best.age_s <= run.age_s ? best : run, null);
  if (!isLive) return shownState.now ? `as of ${utc(shownState.now)}` : "a file";
  if (lost) return lost;
  if (!newest) return runs.length ? "no run can be read" : "no run yet";
  return `${written.length ? `live, step ${whole(newest.step ?? 0)},` : "no run is being written; last write"} ${duration(sinceWrite(newest))} ago`;
}

function drawHead() {
  if (!shownState) return setText(byId("live"), lost ?? "connecting \u2026");
  setText(byId("store"), shownState.store);
  setText(byId("count"), plural(runs.length, "run"));
  setText(byId("live"), liveText());
  byId("live").className = isLive && lost ? "is-lost" : isLive && runs.some((run) => run.state === "running") ? "is-live" : "";
  // A screen reader reads that the connection is lost or back, and not every step.
  setText(byId("status"), isLive ? lost ? "Connection lost, trying again." : "Live." : "");
}

function drawFrame() {
  document.title = (view().ofOneRun && runs.length ? `${theRun().name} \u00b7 ` : "") + `${VIEW_NAMES[at.view]} \u00b7 openrlhf-dbb`;
  keyed(byId("tabs"), runs.length ? Object.keys(VIEW_NAMES) : [], (name) => name, (name) => element("a", { "data-view": name }, VIEW_NAMES[name]),
    (link, name) => setAttributes(link, { href: viewHash(name), "aria-current": name === at.view ? "page" : null }));
  for (const name of Object.keys(VIEW_NAMES)) byId(`view-${name}`).hidden = name !== at.view || !runs.length;
  byId("which").hidden = !view().ofOneRun || !runs.length;
  byId("no-runs").hidden = runs.length > 0;
  if (!runs.length) setText(byId("no-runs"), `No runs yet in ${shownState.store}; start one: openrlhf-dbb train \u2026`);
  keyed(byId("run-choice"), runs, (run) => run.id, (run) => element("option", { value: run.id }),
    (option, run) => setText(option, `${run.name} (${run.state})`));
  if (!runs.length) return;
  const run = theRun();
  setValue(byId("run-choice"), String(run.id));
  setText(byId("run-line"), about(run) + ` \u00b7 step ${whole(run.step ?? 0)}${isNumber(run.planned) ? ` of ${whole(run.planned)}` : ""}`);
}

// ---- drawing

const needed = () => runs.length ? [...view().needs(), ...PROMPT.needs()] : [];

function draw() {
  drawHead();
  drawFrame();
  if (!runs.length) return 0;
  const step = view().draw();
  PROMPT.draw();
  document.documentElement.dataset.step = step;
  return step;
}

// Asks for the answers that the view lacks, then draws it; started: the time at which a change was seen.
async function refresh(started = null) {
  const mine = ++refreshTurn;
  let problem = null, asking = needed();
  if (asking.length && !started) byId("loading").hidden = draw() > 0;
  // An answer may need another one: a prompt's visits decide which rollouts are shown.
  for (let round = 0; asking.length && !problem && round < 3; round++) {
    problem = (await Promise.allSettled(asking)).find((outcome) => outcome.status === "rejected")?.reason;
    if (mine !== refreshTurn) return;
    asking = needed();
  }
  byId("loading").hidden = true;
  const reason = problem?.message ?? (runs.length && view().ofOneRun ? theRun().error : null);
  byId("problem").hidden = !reason || lost !== null;
  if (reason) setText(byId("problem"), `This could not be read: ${reason}`);
  const drawing = performance.now();
  draw();
  if (started) {
    void document.body.offsetHeight; // layout is part of what an update costs
    if (performance.getEntriesByType("measure").length > 1000) performance.clearMeasures();
    performance.measure("update-draw", { start: drawing });
    performance.measure("update-all", { start: started });
  }
  document.documentElement.dataset.ready ??= String(Math.round(performance.now()));
}

function render() {
  readAddress();
  if (shownState) refresh();
}

// ---- live

// After a roll back, steps of the same numbers hold something else.
function forget(id) {
  for (const path of answers.keys()) if (path.startsWith(`runs/${id}/`)) answers.delete(path);
  for (const node of ["groups", "responses"]) drawnKeys.delete(byId(node));
}

async function poll() {
  let wait = POLL_MS;
  try {
    const next = await source.get("state");
    const before = new Map(runs.map((run) => [run.id, run]));
    const first = !shownState, changed = next.runs.length !== runs.length || next.runs.some((run) => before.get(run.id)?.version !== run.version);
    for (const run of next.runs) if (before.get(run.id)?.step > run.step) forget(run.id);
    lost = null;
    arrived = performance.now();
    shownState = next;
    runs = next.runs;
    if (first) render();
    else if (changed) await refresh(performance.now());
    else if (needed().length) await refresh();
    else { drawHead(); if (at.view === "runs") view().draw(); }
  } catch (problem) {
    lost = problem.status ? problem.message : "connection lost, trying again"; // with a status, the server says why
    wait = RETRY_MS;
    drawHead();
  }
  return wait;
}

async function keepPolling() {
  const wait = await poll();
  if (isLive) setTimeout(keepPolling, wait);
}

setUpPool();
setUpCurves();
setUpPrompts();
setUpRollouts();
byId("run-choice").addEventListener("change", (event) => go({ run: event.target.value, prompt: null, visit: null, step: null }));
addEventListener("submit", (event) => event.target.method === "dialog" || event.preventDefault());
addEventListener("popstate", render);
drawHead();
keepPolling();
