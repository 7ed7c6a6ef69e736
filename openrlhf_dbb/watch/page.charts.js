// ---- charts: curves or stacked bars over one axis, with a cursor and a readout of the values

const FEW = 12;

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  const gap = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / gap - 1e-9) + 0; i * gap <= high + gap * 1e-6; i++) found.push(Number((i * gap).toPrecision(12)));
  return found;
}

// Returns the index of the value nearest to x among ascending values.
function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : low;
}

const charts = new WeakMap(); // figure -> chart

const sized = new ResizeObserver((entries) => {
  for (const entry of entries) charts.get(entry.target)?.resized();
});

// Returns a figure's chart, and makes it at the first call.
// options: height; onZoom(from, to); onPick(x), when the cursor is put somewhere by hand; onOpen(line, i), when a point is chosen.
function chartOf(figure, options = {}) {
  if (!charts.has(figure)) {
    charts.set(figure, makeChart(figure, options));
    sized.observe(figure);
  }
  return charts.get(figure);
}

// update() takes title; note; xLabel, xText(x), nameOf(x); yText, yAxis; low, high (of y, if fixed); from, to (of x, if fixed);
// lines [{run, name, slot, second, x, y, raw, low, high, dots}], where run and name may be empty, second marks a run's second measure, and low and high are a band, or
// bars {x, edges, parts [{name, className, y}]}; legend [[mark, name]]; whole: ticks at whole numbers only; marked: a chosen x.
function makeChart(figure, { height = 230, onZoom = null, onPick = null, onOpen = null }) {
  const caption = element("figcaption"), note = element("p", { class: "note" }), legend = element("ul", { class: "legend" });
  const [gridY, textY, textX, bands, faint, curves, dots, bars] = ["grid", "y", "x", "bands", "faint", "curves", "dots", "bars"].map((name) => svg("g", { class: name }));
  const [cursor, marked] = ["cursor", "marked"].map((name) => svg("path", { class: name }));
  const label = svg("text", { "text-anchor": "middle" }), dragged = svg("rect", { class: "dragged" });
  const plot = svg("svg", {}, bars, bands, faint, curves, dots); // cuts off what lies outside the axes
  const drawing = svg("svg", { role: "img", tabindex: "0", height, class: onZoom ? "zoomable" : null },
    gridY, textY, textX, label, plot, marked, dragged, cursor);
  const readout = element("p", { class: "readout" });
  figure.replaceChildren(caption, note, legend, drawing, readout);

  let spec = null, width = 0, cursorAt = null, dragFrom = null;
  let across = null, back = null, upwards = null, left = 52;
  let chosenRun = 0; // by keys, of the runs that have a point at the cursor

  const inside = (x) => x.filter((value) => value >= spec.from && value <= spec.to);
  // The cursor moves along the points of the curve that reaches furthest, and has most points.
  function mainX() {
    if (spec.bars) return spec.bars.x;
    const end = (x) => x.length ? x[x.length - 1] : -Infinity;
    return spec.lines.map((line) => inside(line.x)).reduce((best, x) => end(x) > end(best) || (end(x) === end(best) && x.length > best.length) ? x : best, []);
  }

  function valuesAt(x) {
    if (spec.bars) {
      const i = nearest(spec.bars.x, x);
      return spec.bars.parts.map((part) => `${part.name} ${spec.yText(part.y[i])}`).join(", ");
    }
    const reach = (spec.to - spec.from) / 20;
    const near = spec.lines.map((line) => [line, nearest(line.x, x)]).filter(([line, i]) => line.x.length && Math.abs(line.x[i] - x) <= reach);
    const valueOf = ([line, i]) => [line.name, spec.yText((line.raw ?? line.y)[i]),
      line.low && isNumber(line.low[i]) ? `(${spec.yText(line.low[i])} to ${spec.yText(line.high[i])})` : ""].filter(Boolean).join(" ");
    const byRun = Map.groupBy(near, ([line]) => line.run ?? "");
    return [...byRun].map(([run, values]) => (run && `${run} `) + values.map(valueOf).join(", ")).join("; ");
  }
  const describe = (x) => `${spec.nameOf(x)}: ${valuesAt(x)}`;

  // Returns the points near x, one of each run, as [line, i].
  function pointsAt(x) {
    const reach = (spec.to - spec.from) / 20, points = new Map();
    for (const line of spec.lines) {
      const i = nearest(line.x, x);
      if (line.x.length && Math.abs(line.x[i] - x) <= reach && !points.has(line.id)) points.set(line.id, [line, i]);
    }
    return [...points.values()];
  }
  // Opens the point that is nearest to where the pointer is, among those of the runs.
  function openAt(event) {
    if (cursorAt === null) return;
    const down = event.clientY - drawing.getBoundingClientRect().top;
    const away = ([line, i]) => Math.abs(upwards(line.y[i]) - down);
    const [first, ...others] = pointsAt(cursorAt);
    if (first) onOpen(...others.reduce((best, point) => away(point) < away(best) ? point : best, first));
  }

  function showCursor(x, byHand) {
    if (x === undefined) return;
    cursorAt = byHand ? x : null;
    setAttributes(cursor, { d: byHand ? `M${across(x).toFixed(1)} 8V${height - 40}` : "" });
    setText(readout, describe(x));
  }
  const pointAt = (event) => event.clientX - drawing.getBoundingClientRect().left;
  function follow(event) {
    const x = inside(mainX());
    if (!x.length) return;
    const to = x[nearest(x, back(pointAt(event)))];
    if (event.type === "pointerdown") onPick?.(to);
    showCursor(to, true);
  }
  function endDrag(event, take) {
    if (dragFrom === null) return;
    const ends = [dragFrom, pointAt(event)].sort((a, b) => a - b).map(back);
    const far = Math.abs(pointAt(event) - dragFrom) > 8;
    dragFrom = null;
    setAttributes(dragged, { width: 0 });
    if (take && !far && onOpen) openAt(event);
    if (take && far) onZoom(Math.max(spec.from, ends[0]), Math.min(spec.to, ends[1]));
  }
  drawing.addEventListener("pointerdown", (event) => {
    if (!spec || !across) return;
    readout.removeAttribute("aria-live");
    if (onZoom && event.button === 0) {
      dragFrom = pointAt(event);
      drawing.setPointerCapture(event.pointerId);
    }
    follow(event);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (!spec || !across) return;
    follow(event);
    if (dragFrom === null) return;
    const ends = [dragFrom, pointAt(event)].sort((a, b) => a - b);
    setAttributes(dragged, { x: ends[0], width: ends[1] - ends[0], y: 8, height: height - 48 });
  });
  drawing.addEventListener("pointerup", (event) => endDrag(event, true));
  drawing.addEventListener("pointercancel", (event) => endDrag(event, false));
  drawing.addEventListener("keydown", (event) => {
    if (!spec || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = inside(mainX()), here = x.length ? nearest(x, cursorAt ?? spec.marked ?? x[x.length - 1]) : 0;
    if (onOpen && x.length && openByKey(event.key, x[here])) return event.preventDefault();
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 10, PageDown: here + 10, Home: 0, End: x.length - 1 }[event.key];
    if (to === undefined) return;
    setAttributes(readout, { "aria-live": "polite" });
    const next = x[Math.max(0, Math.min(x.length - 1, to))];
    onPick?.(next);
    showCursor(next, true);
    event.preventDefault();
  });
  // Enter opens a point at x; arrows up and down choose the run, if there are several. Returns whether the key was one of these.
  function openByKey(key, x) {
    const points = pointsAt(x), turn = { ArrowUp: points.length - 1, ArrowDown: 1, Enter: 0 }[key];
    if (!points.length || turn === undefined || (turn && points.length === 1)) return false;
    chosenRun = (chosenRun + turn) % points.length;
    const [line, i] = points[chosenRun];
    if (key === "Enter") onOpen(line, i);
    else {
      setAttributes(readout, { "aria-live": "polite" });
      showCursor(x, true);
      setText(readout, `${describe(x)}; Enter opens ${line.run}`);
    }
    return true;
  }
  drawing.addEventListener("pointerleave", () => {
    if (!spec || !across || drawing === document.activeElement) return;
    cursorAt = null;
    draw();
  });
  // A live chart must not speak by itself: a screen reader reads its values only while keys move the cursor.
  drawing.addEventListener("blur", () => readout.removeAttribute("aria-live"));
  function range() {
    const isShown = (line, y, i) => isNumber(y) && line.x[i] >= spec.from && line.x[i] <= spec.to;
    const values = spec.bars ? [0, 1e-9, ...spec.bars.x.map((_, i) => spec.bars.parts.reduce((sum, part) => sum + (part.y[i] ?? 0), 0))]
      : spec.lines.flatMap((line) => [line.y, line.raw, line.low, line.high].flatMap((ys) => (ys ?? []).filter((y, i) => isShown(line, y, i))));
    const { low = Math.min(...values), high = Math.max(...values) } = spec;
    if (high - low > 1e-9 * Math.abs(high)) return [low, high]; // otherwise all values are one value, apart from rounding
    const size = Number.isFinite(low) && low ? Math.abs(low) * 0.1 : 0.5;
    return Number.isFinite(low) ? [low - size, low + size] : [0, 1];
  }

  const pointsOf = (line, values, up) => values.map((value, i) => isNumber(value) ? `${across(line.x[i]).toFixed(1)} ${up(value).toFixed(1)}` : null).filter(Boolean);
  const pathOf = (line, values, up) => values.length ? `M${pointsOf(line, values, up).join("L")}` : "";

  function drawLines(up) {
    const drawn = spec.lines;
    const withRaw = drawn.filter((line) => line.raw);
    fit(faint, "path", withRaw, (line) => ({ d: pathOf(line, line.raw, up), class: `curve s${line.slot}` }));
    fit(curves, "path", drawn.filter((line) => !line.dots), (line) => ({ d: pathOf(line, line.y, up), class: `curve s${line.slot}${line.second ? " second" : ""}` }));
    // Few points are drawn as dots, too; the second measure of a run has some dots in any case, to be told apart.
    const points = drawn.flatMap((line) => {
      const inside = [...line.x.keys()].filter((i) => line.x[i] >= spec.from && line.x[i] <= spec.to);
      const gap = line.dots || inside.length <= FEW ? 1 : line.second ? Math.ceil(inside.length / FEW) : Infinity;
      return inside.filter((_, n) => n % gap === 0 && gap < Infinity).map((i) => [line, line.x[i], line.y[i]]);
    });
    fit(dots, "circle", points, ([line, x, y]) => ({ r: 3.5, cx: across(x).toFixed(1), cy: up(y).toFixed(1), class: `dot s${line.slot}${line.second || line.dots ? " second" : ""}` }));
    fit(bands, "path", drawn.filter((line) => line.low), (line) => {
      const edge = [...pointsOf(line, line.high, up), ...pointsOf(line, line.low, up).reverse()];
      return { class: "band", d: edge.length ? `M${edge.join("L")}Z` : "" };
    });
  }

  function drawBars(up) {
    const { x, edges, parts } = spec.bars, below = x.map(() => 0);
    fit(bars, "path", parts, (part) => {
      let path = "";
      for (let i = 0; i < x.length; i++) {
        const value = part.y[i] ?? 0, start = across(edges[i]), end = across(edges[i + 1]), gap = end - start > 6 ? 1 : 0;
        const [foot, top] = [up(below[i]), up(below[i] + value)].map((y) => y.toFixed(1));
        if (value > 0) path += `M${start.toFixed(1)} ${foot}V${top}H${(end - gap).toFixed(1)}V${foot}Z`;
        below[i] += value;
      }
      return { d: path, class: part.className };
    });
  }

  function draw() {
    if (!spec || !width) return;
    const [low, high] = range();
    const top = 10, bottom = height - 40, right = width - 12;
    const up = (value) => bottom - (value - low) / (high - low) * (bottom - top);
    upwards = up;
    const marksY = ticks(low, high, height / 46).filter((y) => spec.yText !== whole || Number.isInteger(y)), textsY = marksY.map(spec.yAxis);
    left = Math.max(34, 13 + 7.6 * Math.max(...textsY.map((text) => text.length)));
    const pad = spec.bars ? 0 : 8, size = spec.to - spec.from;
    across = (x) => size > 0 ? left + pad + (x - spec.from) / size * (right - left - 2 * pad) : (left + right) / 2;
    back = (position) => size > 0 ? spec.from + (position - left - pad) / (right - left - 2 * pad) * size : spec.from;
    setAttributes(drawing, { viewBox: `0 0 ${width} ${height}` });
    const box = { x: left, y: 0, width: Math.max(1, right - left + 6), height };
    setAttributes(plot, { ...box, viewBox: `${box.x} 0 ${box.width} ${height}` });
    fit(gridY, "path", marksY, (y) => ({ class: "grid", d: `M${left} ${up(y).toFixed(1)}H${right}` }));
    fit(textY, "text", marksY, (y, i) => ({ "text-anchor": "end", x: left - 7, y: (up(y) + 4).toFixed(1), text: textsY[i] }));
    const marksX = size > 0 ? ticks(spec.from, spec.to, Math.max(2, (right - left) / 80)).filter((x) => !spec.whole || Number.isInteger(x)) : [spec.from];
    fit(textX, "text", marksX, (x) => ({ "text-anchor": "middle", x: Math.min(across(x), width - 4 * short(x).length).toFixed(1), y: bottom + 18, text: short(x) }));
    setAttributes(label, { x: (left + right) / 2, y: height - 4 });
    setText(label, spec.xLabel);
    if (spec.bars) drawBars(up);
    else drawLines(up);
    setAttributes(marked, { d: isNumber(spec.marked) ? `M${across(spec.marked).toFixed(1)} ${top - 6}V${bottom}` : "" });
    const x = inside(mainX()), last = x[x.length - 1];
    const summary = x.length ? ` First, ${describe(x[0])}. Last, ${describe(last)}.` : "";
    setAttributes(drawing, { "aria-label": `${spec.title}.${summary} Arrow keys move along it.${onOpen ? " Enter opens the rollouts of the step." : ""}` });
    if (!x.length) { setText(readout, "nothing in this range"); setAttributes(cursor, { d: "" }); }
    else if (cursorAt === null || cursorAt < spec.from || cursorAt > spec.to) showCursor(isNumber(spec.marked) ? spec.marked : last, false);
    else {
      setAttributes(cursor, { d: `M${across(cursorAt).toFixed(1)} 8V${bottom}` });
      if (!readout.hasAttribute("aria-live")) setText(readout, describe(cursorAt));
    }
  }

  return {
    update(next) {
      if (next.xLabel !== spec?.xLabel || next.marked !== spec?.marked) cursorAt = null;
      spec = { yText: decimal, yAxis: short, nameOf: next.xText, lines: [], ...next };
      const places = spec.bars ? spec.bars.edges : spec.lines.flatMap((line) => line.x);
      spec.from ??= places.length ? Math.min(...places) : 0;
      spec.to ??= places.length ? Math.max(...places) : 1;
      setText(caption, spec.title);
      setText(note, spec.note ?? "");
      note.hidden = !spec.note;
      if (!drawing.hasAttribute("aria-label")) setAttributes(drawing, { "aria-label": spec.title }); // until it is drawn
      keyed(legend, spec.legend ?? [], ([, name]) => name, ([mark, name]) => element("li", {}, mark(), name));
      legend.hidden = !spec.legend?.length;
      draw();
    },
    resized() {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      draw();
    },
  };
}

// The marks of curves in a legend.
const sample = (...children) => svg("svg", { viewBox: "0 0 36 10", class: "sample", "aria-hidden": "true" }, ...children);
const sampleDot = (slot) => svg("circle", { cx: 18, cy: 5, r: 3.5, class: `dot s${slot} second` });
const sampleLine = (slot, second) => svg("path", { d: "M0 5H36", class: `curve s${slot}${second ? " second" : ""}` });
const lineMark = (slot, second = false) => () => sample(sampleLine(slot, second), ...(second ? [sampleDot(slot)] : []));
const dotMark = (slot) => () => sample(sampleDot(slot));
const percentAxis = { yText: percent, yAxis: (value) => `${Number((100 * value).toPrecision(4))}\u00a0%` };
