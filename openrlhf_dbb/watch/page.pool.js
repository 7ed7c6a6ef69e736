// ---- the pool: all prompts in one picture, and what became of them

const STATE_NAMES = ["mastered", "learning", "forgotten", "never solved", "no visits"];
const NO_VISITS = 4;
const TOLD_FIRST = [0, 1, 3, 2]; // the order of the four numbers
const stateClass = (name) => name.replace(" ", "-");

const NO_STATES = "The scores of this run are not known to lie in [0, 1], so its prompts are not sorted into mastered, learning, never solved and forgotten.";

// Returns the state whose prompts are shown, null for all of them.
const chosenState = ({ unit }) => unit ? numberIn("state") : null;

// Explains the estimator's number for a prompt.
const MEANINGS = {
  "posterior mean": "Of each prompt the store keeps alpha and beta: the right and the wrong rollouts of all its visits, older ones"
    + " counting less. They are its posterior, Beta(alpha, beta), and alpha / (alpha + beta) is the expected share of right rollouts.",
  "group mean": "This estimator keeps no history: the group mean is the mean reward of the rollouts of one visit.",
  "estimated mean": "The estimated mean is the reward that the estimator expects of the prompt, from all its visits.",
};

// A cell's byte is 0 before the first visit, else 1 + level + DRAWN if the column has a visit: history.py, picture.
const LEVELS = 126, DRAWN = 128, LEVEL_BITS = 127;

const poolPath = (run) => `runs/${run.id}/pool`;
const meanAt = ({ low, high }, cell) => low + ((cell & LEVEL_BITS) - 1) / LEVELS * (high - low);

// ---- since the last visit

const ONE_VISIT_MS = 30 * 60_000; // a page that is opened again sooner is the same visit

// Returns what this reader saw at an earlier visit, null at the first one; notes what is seen now.
function lastVisit(run, seen) {
  const key = `openrlhf-dbb ${run.uuid}`;
  try {
    const kept = JSON.parse(localStorage.getItem(key)) ?? {}, now = Date.now();
    if (kept.seen && now - kept.seen.at > ONE_VISIT_MS) kept.before = kept.seen;
    if (!document.hidden) localStorage.setItem(key, JSON.stringify({ ...kept, seen: { ...seen, at: now } }));
    return kept.before ?? null;
  } catch {
    return null; // a browser that keeps nothing for pages shows no changes
  }
}

function drawStates({ thresholds, id }, counts, before, meanName) {
  const meanings = [`${meanName} of ${thresholds.mastered} or more`, "solved sometimes",
    `${meanName} fell by ${thresholds.forgotten} or more from its highest`, `no success so far, ${meanName} of ${thresholds.unsolved} or less`];
  const make = (s) => element("a", {}, element("strong", {}, swatch(stateClass(STATE_NAMES[s])), ` ${STATE_NAMES[s]}`),
    element("b"), element("span"), element("span", { class: "note" }, meanings[s]));
  keyed(byId("states"), TOLD_FIRST, (s) => `${s} ${meanName}`, (s) => element("li", {}, make(s)), (item, s) => {
    const [link] = item.children, chosen = at.state === String(s), change = before ? counts[s] - before.counts[s] : 0;
    setAttributes(link, { href: addressWith({ state: chosen ? null : s, rows: null }), "aria-current": chosen ? "true" : null });
    setText(link.children[1], whole(counts[s]));
    setText(link.children[2], (change ? `${change > 0 ? "+" : ""}${whole(change)} \u00b7 ` : "") + percent(counts[s] / id.length));
  });
}

// ---- the picture

let painted = null; // what the picture shows: its answer, the rows of it from top to bottom, how many lines hold them

// Returns the prompts of the picture as places in the answer, from the highest mean to the lowest.
function shownRows(answer) {
  const state = chosenState(answer), places = [...answer.state.keys()].filter((row) => state === null || answer.state[row] === state);
  const [from, to] = (at.rows ?? "").split("-").map(Number);
  return to > from && from >= 0 ? places.slice(from, to) : places;
}

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));

// Returns the colours of the levels, red + 2^8 green + 2^16 blue: three colours of the style sheet, and those between them.
function ramp() {
  const stops = ["--low", "--middle", "--high"].map(colourOf);
  return Array.from({ length: LEVELS + 1 }, (_, level) => {
    const place = 2 * level / LEVELS, i = Math.min(1, Math.floor(place)), part = place - i;
    return stops[i].reduce((sum, value, c) => sum + (Math.round(value + (stops[i + 1][c] - value) * part) << 8 * c), 0);
  });
}

// Returns the sums over the prompts of each line, line after line: visited so far, of these the levels, drawn.
function sumsOf({ cells, columns }, rows, lines) {
  const [seen, levels, drawn] = [0, 1, 2].map(() => new Uint32Array(lines * columns));
  for (let line = 0; line < lines; line++) {
    const end = Math.floor((line + 1) * rows.length / lines), to = line * columns;
    for (let i = Math.floor(line * rows.length / lines); i < end; i++) {
      const from = rows[i] * columns;
      for (let k = 0; k < columns; k++) {
        const cell = cells[from + k];
        if (!cell) continue;
        seen[to + k]++;
        levels[to + k] += (cell & LEVEL_BITS) - 1;
        if (cell & DRAWN) drawn[to + k]++;
      }
    }
  }
  return { seen, levels, drawn };
}

const STRIP = 8, PALE = 0.3; // pixels of the states' strip; opacity of a prompt that is not drawn

function paint(answer, rows) {
  const canvas = byId("pool"), { columns } = answer, scale = devicePixelRatio;
  const width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  const colours = ramp(), key = [at.state, at.rows, width, height, ...colours].join();
  if (painted?.answer === answer && painted.key === key) return;
  setAttributes(canvas, { width, height });
  const lines = Math.min(height, rows.length), right = width - STRIP * scale, size = rows.length / lines;
  painted = { answer, key, rows, lines };
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  if (!lines) return;
  const { seen, levels, drawn } = sumsOf(answer, rows, lines);
  // Of a line of many prompts, few are drawn in a column: three times the mean has the full colour.
  const mean = drawn.reduce((sum, count) => sum + count, 0) / drawn.length, full = Math.max(1, Math.min(size, 3 * mean));
  const small = new OffscreenCanvas(columns, lines), image = new ImageData(columns, lines), pixels = new DataView(image.data.buffer);
  for (let i = 0; i < seen.length; i++) {
    const opacity = (PALE + (1 - PALE) * Math.min(1, drawn[i] / full)) * Math.min(1, seen[i] / size);
    if (seen[i]) pixels.setUint32(4 * i, colours[Math.round(levels[i] / seen[i])] + 2 ** 24 * Math.floor(255 * opacity), true);
  }
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, columns, lines, 0, 0, right - 2 * scale, height);
  const states = STATE_NAMES.map((name) => `rgb(${colourOf(name === "no visits" ? "--line" : `--${stateClass(name)}`)})`);
  for (let line = 0; line < lines; line++) {
    context.fillStyle = states[answer.unit ? answer.state[rows[Math.floor((line + 0.5) * size)]] : NO_VISITS];
    context.fillRect(right, Math.floor(line * height / lines), width, Math.ceil(height / lines));
  }
}

// ---- pointing at the picture

let pointed = { line: 0, column: 0 }; // of the picture
let toldRun = null; // whose picture the text below it is about
const promptIn = (line) => painted.rows[Math.floor((line + 0.5) * painted.rows.length / painted.lines)];
const stepsOf = ({ width, columns, last }, k) => width === 1 ? `step ${whole(k + 1)}`
  : `steps ${whole(k * width + 1)} to ${whole(k === columns - 1 ? last : (k + 1) * width)}`;

function point(line, column, byKey = false) {
  const { answer, rows, lines } = painted;
  if (!lines || !answer.columns) return;
  pointed = { line: Math.max(0, Math.min(lines - 1, line)), column: Math.max(0, Math.min(answer.columns - 1, column)) };
  const row = promptIn(pointed.line), cell = answer.cells[row * answer.columns + pointed.column], others = rows.length / lines;
  const told = !cell ? "not visited yet" : `${theRun().mean_name} ${meanAt(answer, cell).toFixed(2)}, ${cell & DRAWN ? "drawn" : "not drawn"}`;
  setAttributes(byId("pool-told"), { "aria-live": byKey ? "polite" : null });
  setText(byId("pool-told"), `Prompt ${answer.id[row]}${answer.unit ? `, ${STATE_NAMES[answer.state[row]]}` : ""}; ${stepsOf(answer, pointed.column)}: ${told}`
    + (others > 1.5 ? ` (one of ${whole(others)} prompts in this line; drag to see them apart)` : ""));
  byId("pool-line").hidden = false;
  Object.assign(byId("pool-line").style, { top: `${100 * pointed.line / lines}%`, height: `${100 / lines}%` });
}

function openPointed() {
  const { answer } = painted;
  point(pointed.line, pointed.column); // there may be fewer lines by now
  go({ prompt: answer.id[promptIn(pointed.line)], visit: Math.min(answer.last, (pointed.column + 1) * answer.width) });
}

function setUpPool() {
  const canvas = byId("pool"), band = byId("pool-band");
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / (box.width - STRIP)].map((part) => Math.max(0, Math.min(0.9999, part)));
  };
  const follow = (event) => {
    const [down, across] = place(event);
    point(Math.floor(down * painted.lines), Math.floor(across * painted.answer.columns));
    return down;
  };
  let from = null;
  const isFar = (to) => Math.abs(to - from) * canvas.clientHeight > 8;
  canvas.addEventListener("pointerdown", (event) => {
    const down = follow(event);
    if (event.pointerType === "mouse" && event.button === 0) from = down; // a finger that is dragged scrolls the page
  });
  canvas.addEventListener("pointermove", (event) => {
    const to = follow(event);
    band.hidden = from === null || !isFar(to);
    if (from !== null) Object.assign(band.style, { top: `${100 * Math.min(from, to)}%`, height: `${100 * Math.abs(to - from)}%` });
  });
  canvas.addEventListener("click", (event) => {
    const to = place(event)[0], began = from;
    if (began === null || !isFar(to)) openPointed();
    else {
      const size = painted.rows.length, first = Number((at.rows ?? "0").split("-")[0]);
      const [top, bottom] = [Math.floor(Math.min(began, to) * size), Math.ceil(Math.max(began, to) * size)];
      go({ rows: `${first + top}-${first + bottom}` });
    }
    from = null;
    band.hidden = true;
  });
  canvas.addEventListener("pointerleave", () => { from = null; band.hidden = byId("pool-line").hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const { line, column } = pointed;
    const to = { ArrowUp: [line - 1, column], ArrowDown: [line + 1, column], PageUp: [line - 20, column], PageDown: [line + 20, column],
      ArrowLeft: [line, column - 1], ArrowRight: [line, column + 1], Home: [line, 0], End: [line, Infinity] }[event.key];
    if (event.key === "Enter") openPointed();
    else if (to && !event.ctrlKey && !event.metaKey && !event.altKey) point(...to, true);
    else return;
    event.preventDefault();
  });
  byId("pool-all").addEventListener("click", () => go({ state: null, rows: null }));
  new ResizeObserver(() => painted && paint(painted.answer, painted.rows)).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => painted && paint(painted.answer, painted.rows));
}

// ---- drawn against not drawn

// Returns what chartOf() needs of the steps for bars that each stand for `width` of them; ends: the last step of each.
function stepBars(ends, width) {
  const edges = [0, ...ends], middles = ends.map((end, i) => (end + edges[i] + 1) / 2);
  const xText = (x) => {
    const i = nearest(middles, x);
    return (ends[i] - edges[i] > 1 ? `${whole(edges[i] + 1)} to ` : "") + whole(ends[i]);
  };
  return { middles, edges: edges.map((edge) => edge + 0.5), axis: { whole: true, xText, from: edges[0] + 0.5, to: ends[ends.length - 1] + 0.5,
    nameOf: (x) => `step${xText(x).includes(" ") ? "s" : ""} ${xText(x)}`, xLabel: width > 1 ? `step (each bar: ${whole(width)} steps)` : "step" } };
}

function drawShares(answer, meanName) {
  const { low, high, width, last, states, beliefs } = answer, classes = beliefs[0].length - 1, edge = (c) => decimal(low + c / classes * (high - low));
  const { middles, edges, axis } = stepBars(states.map((_, k) => Math.min(last, (k + 1) * width)), width);
  const byState = STATE_NAMES.slice(0, 4).map((name, s) => ({ name, className: stateClass(name),
    y: states.map((counts) => counts[s] / counts.reduce((sum, count) => sum + count)) }));
  chartOf(byId("state-shares")).update({ ...axis, ...percentAxis, high: 1, title: "Visited prompts by state",
    bars: { x: middles, edges, parts: byState }, legend: byState.map((part) => [() => swatch(part.className), part.name]) });
  const names = [...Array.from({ length: classes }, (_, c) => `${edge(c)}\u2013${edge(c + 1)}`), "not visited before"];
  [["drawn", "Drawn"], ["others", "Not drawn"]].forEach(([key, word], which) => {
    const parts = names.map((name, c) => ({ name, className: c < classes ? `belief-${c}` : "no-visits", y: beliefs[which][c] }));
    chartOf(byId(`beliefs-${key}`)).update({ ...axis, ...percentAxis, high: 1, title: `${word}: ${meanName} before the step`,
      bars: { x: middles, edges, parts }, legend: parts.map((part) => [() => swatch(part.className), part.name]) });
  });
}

function describePicture(answer, rows, meanName) {
  const { id, last } = answer, shared = painted.lines < rows.length; // whether a line holds several prompts
  setText(byId("pool-title"), `${rows.length < id.length ? `${whole(rows.length)} of ` : ""}${plural(id.length, "prompt")}: `
    + `a row is a prompt, the highest ${meanName} now at the top; a column is ${answer.width > 1 ? `${whole(answer.width)} steps` : "a step"}`);
  [byId("ramp-low"), byId("ramp-high")].forEach((node, i) => setText(node, `${i ? "" : `${meanName} `}${decimal(i ? answer.high : answer.low)}`));
  byId("pool-all").hidden = rows.length === id.length;
  [1, Math.ceil(last / 2), last].forEach((step, i) => setText(byId("pool-steps").children[i], i < last ? `${i ? "" : "step "}${whole(step)}` : ""));
  setAttributes(byId("pool"), { "aria-label": `${byId("pool-title").textContent}. Arrow keys move in it, Enter opens a prompt.` });
  setText(byId("key-drawn"), shared ? "many drawn" : "drawn");
  setText(byId("key-pale"), shared ? "none drawn" : "not drawn");
  if (toldRun !== theRun().id) setText(byId("pool-told"), "Point at the picture for its numbers; choose a prompt to open it; drag to see some rows alone.");
  toldRun = theRun().id;
}

VIEWS.pool = {
  ofOneRun: true,
  needs: () => [need(poolPath(theRun()), theRun().version)].filter(Boolean),
  draw() {
    const answer = got(poolPath(theRun()));
    if (!answer) return 0;
    const { last, unit, state } = answer, meanName = theRun().mean_name;
    const counts = STATE_NAMES.map((_, s) => state.filter((each) => each === s).length);
    byId("pool-body").hidden = !last;
    byId("states").hidden = byId("state-shares").hidden = !last || !unit;
    if (!last) {
      setText(byId("pool-note"), "No prompt was visited yet.");
      return theRun().step ?? 0;
    }
    const before = lastVisit(theRun(), { counts, step: last }), rows = shownRows(answer);
    drawStates(answer, counts, before, meanName);
    setText(byId("pool-note"), [before && `Changes are since your last visit, ${duration((Date.now() - before.at) / 1000)} ago at step ${whole(before.step)}.`,
      counts[NO_VISITS] && `${plural(counts[NO_VISITS], "prompt")} without a visit, known from the warm start.`,
      meanName !== "posterior mean" && MEANINGS[meanName],
      !unit && NO_STATES].filter(Boolean).join(" "));
    byId("pool").style.height = rows.length < 30 ? `${Math.max(1, rows.length) * 20}px` : ""; // else as the style sheet says
    paint(answer, rows);
    describePicture(answer, rows, meanName);
    drawShares(answer, meanName);
    return last;
  },
};
