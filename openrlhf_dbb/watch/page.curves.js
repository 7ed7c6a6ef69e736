// ---- the curves of several runs, drawn over each other

const MOST_RUNS = 8;
const AXES = {
  steps: { xLabel: "step", xText: whole, whole: true },
  rollouts: { xLabel: "rollouts generated", xText: whole, whole: true },
  tokens: { xLabel: "tokens generated", xText: short },
  hours: { xLabel: "hours since the first step", xText: or((value) => `${value.toFixed(2)} h`) },
};
// Where 0 stands for a value that was not measured (no reference model, no lengths), `measured` is Boolean.
const CHARTS = [
  { key: "held-out", title: "Held-out accuracy", dots: true, ...percentAxis,
    note: ({ held_out: held }) => held && `Mean score of ${plural(held.prompts, "prompt")} \u00d7 ${plural(held.samples, "sample")} that are not trained on.`,
    read: (series) => series.held_out && [{ ...series.held_out, y: series.held_out.accuracy }] },
  { key: "reward", title: "Training reward", of: [["reward"]] },
  { key: "length", title: "Response length, tokens", measured: Boolean, of: [["length", "m:response_length"]] },
  { key: "entropy", title: "Entropy", of: [["m:entropy_loss", "m:entropy", "m:actor/entropy"]] },
  { key: "clip", title: "Clip fraction", of: [["m:ppo_clip_ratio", "m:clip_ratio/region_mean", "m:actor/pg_clipfrac"]] },
  { key: "grad-norm", title: "Gradient norm", of: [["m:actor_grad_norm", "m:grad_norm", "m:actor/grad_norm"]] },
  { key: "kl", title: "KL divergence", measured: Boolean, of: [["m:kl", "m:actor/kl_loss"], ["m:ppo_kl", "m:actor/ppo_kl"]], names: ["from the reference", "from the rollout policy"] },
  { key: "policy-loss", title: "Policy loss", of: [["m:policy_loss", "m:loss", "m:actor/pg_loss"]] },
  { key: "zero-variance", title: "Rollouts in zero-variance groups", of: [["zero_variance", "m:estimator/zero_variance"], ["given_advantage", "m:estimator/rescued"]], names: ["all", "those given an advantage"], low: 0, ...percentAxis,
    note: () => "Both are shares of all generated rollouts: those whose group has equal rewards, and those of them that were given an advantage." },
  { key: "mixed", title: "Mixed groups", of: [["m:posterior/mixed"], ["m:posterior/mixed_even"]], names: ["as drawn", "with even draws, estimated"], low: 0, ...percentAxis },
  { key: "probes", title: "Error against the probes", dots: true, of: [["m:probe/mse"], ["m:probe/mse_point"]], names: ["stored estimate", "group's own mean"],
    note: () => "Mean squared error against extra rollouts that were never trained on, less their own noise: chance can make it negative." },
  { key: "estimator-mean", title: "Mean of the estimates", of: [["m:estimator/mean"]] },
  { key: "unverified", title: "Prompts set aside, since none of their last rollouts could be verified", of: [["m:estimator/unverified"]], low: 0 },
  { key: "lag", title: "Lag, training steps", of: [["m:async/lag"]], low: 0,
    note: () => "Between the policy that wrote a rollout and the one that trained on it, mean over the rollouts; 0: on-policy." },
];

const seriesPath = (run) => `runs/${run.id}/series`;
const seriesOf = (run) => got(seriesPath(run));
const needSeries = (run) => need(seriesPath(run), run.version);

// Returns where the points of curves lie on an axis; null if the run has not recorded it.
function axisOf(curves, axis) {
  const values = curves[axis];
  return axis === "steps" ? curves.step ?? null : values?.some(axis === "tokens" ? Boolean : isNumber) ? values : null;
}

// Returns an exponential moving average; dividing by the mass keeps its start from being pulled to 0.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return sum / mass;
  });
}

const chosenAxis = () => Object.hasOwn(AXES, at.x) ? at.x : "steps";
const smoothing = () => at.smooth === undefined || !(Number(at.smooth) >= 0) ? 0.6 : Math.min(0.999, Number(at.smooth));
const numberIn = (name) => at[name] !== undefined && at[name] !== "" && Number.isFinite(Number(at[name])) ? Number(at[name]) : null;
const zoom = () => ({ from: numberIn("from"), to: numberIn("to") });
const zoomTo = (from, to) => go(from === null ? { from: null, to: null } : { from: Number(from.toPrecision(4)), to: Number(to.toPrecision(4)) });

// Returns the runs to be drawn; the place of a run among them decides its colour and dashes.
function drawnRuns() {
  const wanted = at.runs === undefined ? runs.slice(0, 3) : at.runs.split(",").map((id) => runs.find((run) => String(run.id) === id)).filter(Boolean);
  return [...new Set(wanted)].slice(0, MOST_RUNS);
}
const slotOf = (run) => drawnRuns().indexOf(run);

// Returns a run's curves in the order of the chart's measures; null where the run has none.
function readChart(chart, answer) {
  if (chart.read) return chart.read(answer);
  return chart.of.map((names) => {
    const name = names.find((each) => answer.curves[each]?.some(chart.measured ?? isNumber));
    return name ? { ...answer.curves, y: answer.curves[name] } : null;
  });
}

function chartLines(chart, run, several) {
  const all = seriesOf(run);
  if (!all) return [];
  const found = axisOf(all.curves, chosenAxis()) ? readChart(chart, all) : null;
  if (!found) return [];
  const weight = chart.dots ? 0 : smoothing() ** all.width;
  return found.flatMap((curve, m) => {
    if (!curve) return [];
    // A metric that is not measured in every step is drawn from one measurement to the next.
    const places = axisOf(curve, chosenAxis()) ?? [], known = [...places.keys()].filter((i) => isNumber(curve.y[i]) && isNumber(places[i]));
    const y = known.map((i) => curve.y[i]), x = known.map((i) => places[i]), step = known.map((i) => curve.step[i]);
    if (!known.length) return [];
    const named = { run: several ? shortName(run) : "", name: found.filter(Boolean).length > 1 ? chart.names[m] : "" };
    const drawn = weight > 0 && y.length > 1 ? { raw: y, y: smoothed(y, weight) } : { y };
    return [{ ...named, ...drawn, x, step, id: run.id, slot: slotOf(run), second: m > 0 }];
  });
}

// Opens the rollouts of the step of a point.
function openStep(line, i) {
  location.hash = viewHash("rollouts", { run: line.id, step: line.step[i] });
}

const shortName = (run) => run.name.length > 28 ? `${run.name.slice(0, 27)}\u2026` : run.name;

function drawCurveCharts(host, list, drawn) {
  const { from, to } = zoom(), axis = AXES[chosenAxis()];
  const specs = list.map((chart) => ({ chart, lines: drawn.flatMap((run) => chartLines(chart, run, drawn.length > 1)) })).filter(({ lines }) => lines.length);
  // All charts have the same axis, even if their own curves cover a part of it.
  const places = drawn.flatMap((run) => [seriesOf(run).curves, seriesOf(run).held_out ?? {}]).flatMap((of) => axisOf(of, chosenAxis()) ?? []).filter(isNumber);
  const low = Math.min(...places), high = Math.max(...places);
  const span = from !== null || to !== null ? { from: from ?? low, to: to ?? high } : low <= high ? { from: low, to: high } : {};
  const unit = { rollouts: " rollouts", tokens: " tokens" }[chosenAxis()] ?? "", before = chosenAxis() === "steps" ? "step " : "";
  const nameOf = (x) => `${before}${axis.xText(x)}${unit}`;
  keyed(host, specs, ({ chart }) => chart.key, ({ chart }) => element("figure", { "data-chart": chart.key }), (figure, { chart, lines }) => {
    const measures = (chart.names ?? []).filter((_, m) => lines.some((line) => line.second === m > 0));
    const notes = new Set(chart.note ? drawn.map((run) => chart.note(seriesOf(run))).filter(Boolean) : []);
    const slot = drawn.length > 1 ? "x" : 0;
    chartOf(figure, { onZoom: zoomTo, onOpen: openStep, height: host.id === "charts" ? 230 : 180 }).update({
      title: chart.title, note: notes.size === 1 ? [...notes][0] : "", lines, ...axis, ...span, nameOf,
      yText: chart.yText ?? decimal, yAxis: chart.yAxis ?? short, low: chart.low,
      legend: measures.map((name) => [lineMark(slot, chart.names.indexOf(name) > 0), name]) });
  });
}

VIEWS.curves = {
  needs: () => [...drawnRuns().map(needSeries), needComparison(drawnRuns())].filter(Boolean),
  draw() {
    const drawn = drawnRuns(), axis = chosenAxis(), { from, to } = zoom(), loaded = drawn.filter((run) => seriesOf(run));
    setValue(byId("axis"), axis);
    if (byId("smooth") !== document.activeElement) byId("smooth").value = smoothing();
    setText(byId("smooth-text"), smoothing() ? `${smoothing().toFixed(2)}, about ${plural(Math.round(1 / (1 - smoothing())), "step")}` : "none");
    setAttributes(byId("smooth"), { "aria-valuetext": byId("smooth-text").textContent });
    byId("reset").disabled = from === null && to === null;
    const entry = (run) => element("li", {}, lineMark(slotOf(run))(), element("a", { dir: "auto" }), element("span", { class: "note" }));
    keyed(byId("legend"), drawn, (run) => `${run.id} ${slotOf(run)}`, entry, (item, run) => {
      setAttributes(item.children[1], { href: viewHash("run", { run: run.id }) });
      setText(item.children[1], run.name);
      setText(item.children[2], ` ${run.state}, step ${whole(run.step ?? 0)}`);
    });
    drawCurveCharts(byId("charts"), CHARTS, loaded);
    const known = new Set(CHARTS.flatMap((chart) => (chart.of ?? []).flat()));
    const metrics = new Set(loaded.filter((run) => axisOf(seriesOf(run).curves, axis)).flatMap((run) => {
      const { curves } = seriesOf(run);
      return Object.keys(curves).filter((name) => name.startsWith("m:") && name !== "m:plan/steps" && !known.has(name) && curves[name].some(isNumber));
    }));
    const others = [...metrics].sort();
    byId("others").hidden = !others.length;
    byId("others").open = at.more === "1";
    setText(byId("others").firstElementChild, plural(others.length, "other metric"));
    const own = others.map((name) => ({ key: name, title: name.slice(2), of: [[name]] }));
    if (byId("others").open) drawCurveCharts(byId("other-charts"), own, loaded);
    setText(byId("curves-note"), curvesNote(drawn, loaded, axis));
    drawComparison(drawn);
    return Math.max(0, ...loaded.map((run) => seriesOf(run).last ?? 0));
  },
};

function curvesNote(drawn, loaded, axis) {
  if (!drawn.length) return "No run is chosen: tick some in the view Runs.";
  const notes = [], without = loaded.filter((run) => !axisOf(seriesOf(run).curves, axis)), empty = loaded.filter((run) => !seriesOf(run).last);
  if (empty.length) notes.push(`No step was recorded yet: ${empty.map((run) => run.name).join(", ")}.`);
  if (without.length) notes.push(`${axis[0].toUpperCase()}${axis.slice(1)} were not recorded: ${without.map((run) => run.name).join(", ")}.`);
  const widest = Math.max(1, ...loaded.map((run) => seriesOf(run).width));
  if (widest > 1) notes.push(`Each point is the mean of up to ${whole(widest)} steps.`);
  if (smoothing()) notes.push("Lines are smoothed; the number under a chart is the one of its step.");
  return [...notes, "Choose a point to read the rollouts of its step: click, or arrow keys and Enter. Drag over a chart to zoom."].join(" ");
}

// Two runs are compared as the command compare does: the second is the one that began later.
const comparisonPath = ([a, b]) => `runs/${Math.min(a.id, b.id)}/compare/${Math.max(a.id, b.id)}`;
const needComparison = (drawn) => drawn.length === 2 && drawn.every((run) => run.held_out)
  ? need(comparisonPath(drawn), drawn.map((run) => run.version).join()) : null;

function drawComparison(drawn) {
  const answer = drawn.length === 2 && drawn.every((run) => run.held_out) ? got(comparisonPath(drawn)) : null;
  byId("comparison").hidden = !answer?.difference;
  if (!answer?.difference) return;
  const [first, second] = [...drawn].sort((a, b) => a.id - b.id).map((run) => run.name);
  const { difference, low, high, prompts, samples, verdict } = answer.difference, points = or((value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`);
  byId("comparison").replaceChildren(`Held-out accuracy, ${second} (second) minus ${first} (first), last evaluations: ${points(difference)} points, `
    + `95\u00a0% interval ${points(low)} to ${points(high)} (${plural(prompts, "prompt")} \u00d7 ${[...new Set(samples)].join(" and ")} samples): `,
  element("strong", {}, verdict), `. ${answer.caution}`);
}

function setUpCurves() {
  byId("axis").addEventListener("change", (event) => go({ x: event.target.value === "steps" ? null : event.target.value, from: null, to: null }));
  byId("smooth").addEventListener("input", (event) => go({ smooth: event.target.value }, { replace: true }));
  byId("reset").addEventListener("click", () => zoomTo(null, null));
  byId("others").addEventListener("toggle", (event) => { if (at.view === "curves") go({ more: event.target.open ? "1" : null }, { replace: true }); });
}
