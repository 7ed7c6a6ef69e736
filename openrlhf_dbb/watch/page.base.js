"use strict";
// Draws the page from a server's answers, or from the same answers in the file. All text goes in as text nodes.

const byId = (id) => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Writes only a text that differs: most of a live page stays as it is.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}
function setValue(field, value) {
  if (field !== document.activeElement && field.value !== value) field.value = value;
}

const keptNodes = new WeakMap();

// Gives host one child for each item; a child stays the same node as long as its item's key is there.
function keyed(host, items, keyOf, make, update = () => {}) {
  const old = keptNodes.get(host) ?? new Map(), now = new Map();
  for (const item of items) now.set(String(keyOf(item)), item);
  for (const [key, node] of old) if (!now.has(key)) { node.remove(); old.delete(key); }
  let place = host.firstChild;
  for (const [key, item] of now) {
    let node = old.get(key);
    if (!node) old.set(key, node = make(item));
    update(node, item);
    if (node === place) place = place.nextSibling;
    else host.insertBefore(node, place);
  }
  const order = [...now.keys()];
  keptNodes.set(host, new Map(order.map((key) => [key, old.get(key)])));
}

// Gives a group one child of a tag for each item, with these attributes; a text is set, too.
function fit(group, tag, items, attributesOf) {
  while (group.childNodes.length > items.length) group.lastChild.remove();
  while (group.childNodes.length < items.length) group.append(svg(tag));
  items.forEach((item, i) => {
    const { text, ...attributes } = attributesOf(item, i), node = group.childNodes[i];
    setAttributes(node, attributes);
    if (text !== undefined) setText(node, text);
  });
}

const drawnKeys = new WeakMap();

// Draws into a node unless it already shows what has this key, so that a reader keeps the place.
function drawOnce(node, key, draw) {
  if (drawnKeys.get(node) === key) return;
  drawnKeys.set(node, key);
  draw();
}

// Draws a table with a row for each item. columns: [{name, left, make, update}], where make() returns the node in a cell (a
// text if there is none) and update(node, item) returns its text, or fills the node itself.
function drawTable(table, columns, items, keyOf) {
  const side = (column) => ({ class: column.left ? "state" : null });
  keyed(table.tHead, [columns.map((column) => column.name).join()], (names) => names,
    () => element("tr", {}, ...columns.map((column) => element("th", { scope: "col", ...side(column) }, column.head?.() ?? column.name))),
    (row) => columns.forEach((column, c) => column.updateHead?.(row.cells[c])));
  const makeRow = () => element("tr", {}, ...columns.map((column) => element("td", side(column), ...(column.make ? [column.make()] : []))));
  keyed(table.tBodies[0], items, (item) => `${keyOf(item)} ${columns.length}`, makeRow, (row, item) => columns.forEach((column, c) => {
    const node = column.make ? row.cells[c].firstChild : row.cells[c], text = column.update(node, item);
    if (text !== undefined) setText(node, text);
  }));
}

// ---- numbers and texts

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const or = (format) => (value) => isNumber(value) ? format(value) : "-";
const whole = or((value) => Math.round(value).toLocaleString("en"));
const percent = or((value) => `${(100 * value).toFixed(1)}\u00a0%`);
const fixed = or((value) => value.toFixed(3));
const signed = or((value) => Math.abs(value) < 0.005 ? "0.00" : (value > 0 ? "+" : "") + value.toFixed(2));
const decimal = or((value) => {
  const size = Math.abs(value);
  return size >= 1000 ? whole(value) : size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
});
const short = or((value) => {
  const [unit, letter] = Math.abs(value) >= 1e9 ? [1e9, "G"] : Math.abs(value) >= 1e6 ? [1e6, "M"] : Math.abs(value) >= 1e4 ? [1e3, "k"] : [1, ""];
  const part = value / unit;
  return (part && Math.abs(part) < 1e-3 ? part.toExponential(0) : String(Number(part.toPrecision(4)))) + letter;
});
const utc = (moment) => `${String(moment).slice(0, 19).replace("T", " ")} UTC`; // as the store has it
const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (!isNumber(seconds)) return "-";
  const [value, unit] = seconds < 90 ? [seconds, "s"] : seconds < 5400 ? [seconds / 60, "min"] : seconds < 172800 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
  return `${unit === "h" && value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

// Returns a prompt in one line, without the template that all prompts of the run share.
function brief(text, run) {
  const [start, end] = run.template, from = start && text.startsWith(start) ? start.length : 0;
  const to = end && text.length >= from + end.length && text.endsWith(end) ? text.length - end.length : text.length;
  return text.slice(from, Math.min(to, from + 300));
}

// Returns a box with a text; a long text scrolls in it.
const textBox = (text, label) => element("pre", { dir: "auto", tabindex: "0", role: "group", "aria-label": label }, text);

const swatch = (className) => svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" },
  svg("rect", { width: 10, height: 10, rx: 2, class: className }));

const pairs = (list) => list.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, element("bdi", {}, String(value ?? "-")))]);

// Draws a tile for each number that is known.
function drawNumbers(host, numbers) {
  keyed(host, numbers.filter(([, value]) => value !== "-"), ([name]) => name, ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    (node, [, value]) => setText(node.lastChild, value));
}

// ---- where the answers come from

const pageData = JSON.parse(byId("data").textContent);
const isLive = pageData.live === true;

const source = {
  async get(path) {
    if (!isLive) {
      const answer = pageData.answers[path.replace(/(rollouts\/\d+)\/.*/, "$1")]; // it has whole steps
      if (answer === undefined) throw Object.assign(new Error("not in this file."), { status: 404 });
      return answer;
    }
    const response = await fetch(`api/${path}`, { cache: "no-store" });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw Object.assign(new Error(answer.error ?? `the server answered ${response.status}`), { status: response.status });
    return answer;
  },
  // Returns the steps of a run whose rollouts lie in the file; null if there is a server to ask.
  steps(id) {
    if (isLive) return null;
    const found = Object.keys(pageData.answers).map((path) => path.match(`^runs/${id}/rollouts/(\\d+)$`)).filter(Boolean);
    return found.map((match) => Number(match[1])).sort((a, b) => a - b);
  },
};

// Returns an answer whose cells, if it has any, are bytes.
async function unpacked(answer) {
  if (typeof answer.cells !== "string") return answer;
  const letters = atob(answer.cells), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return { ...answer, columns: answer.states.length, cells: new Uint8Array(await new Response(inflated).arrayBuffer()) };
}

const underWay = new Map();

const answers = new Map(); // path -> {version, answer, error, restsUntil}

// Returns a promise if this version of an answer has to be asked for, otherwise null.
// An answer that took long is not asked for again at once, so that the server spends a fifth of its time on it at most.
function need(path, version) {
  const kept = answers.get(path);
  if (kept && (kept.version === version || performance.now() < kept.restsUntil)) return null;
  const ask = async () => {
    const entry = { version, answer: kept?.answer, error: null }, began = performance.now();
    try {
      entry.answer = await unpacked(await source.get(path));
    } catch (problem) {
      if (!(problem.status >= 400 && problem.status < 500)) throw problem; // to be asked for again
      entry.error = problem.message;
    }
    entry.restsUntil = performance.now() + 4 * (performance.now() - began);
    answers.delete(path);
    answers.set(path, entry);
    if (answers.size > 200) answers.delete(answers.keys().next().value);
  };
  // A path is asked for once at a time: a second caller waits for the same answer.
  if (!underWay.has(path)) underWay.set(path, ask().finally(() => underWay.delete(path)));
  return underWay.get(path);
}

const got = (path) => answers.get(path)?.answer;

// ---- the address: everything that is chosen is in its hash

const GENERAL = ["run", "runs", "x", "smooth"]; // these hold in all views
const VIEWS = {}; // by name: needs() returns requests under way, draw() returns the newest step that it drew
const VIEW_NAMES = { pool: "Pool", curves: "Curves", runs: "Runs", usage: "Where the rollouts went", prompts: "Prompts", rollouts: "Rollouts", run: "Run" };
let at = {};

function hashOf(chosen) {
  const present = Object.entries(chosen).filter(([, value]) => value !== null && value !== undefined);
  return "#" + new URLSearchParams(present).toString().replaceAll("%2C", ",");
}

function readAddress() {
  at = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!Object.hasOwn(VIEW_NAMES, at.view)) at.view = "pool";
}

// Returns the address of another view, with the same runs and axis.
function viewHash(view, changes = {}) {
  const general = Object.fromEntries(GENERAL.filter((name) => name in at).map((name) => [name, at[name]]));
  return hashOf({ view, ...general, ...changes });
}

const addressWith = (changes) => hashOf({ ...at, ...changes });

// Changes the address. Sliders and typing replace the entry of the browser's history; they would flood it.
function go(changes, { replace = false } = {}) {
  const hash = addressWith(changes);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  render();
}
