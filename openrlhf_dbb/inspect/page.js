// ---- sections

const fact = Object.fromEntries(data.facts);
const heldOut = data.held_out && unpackAll(data.held_out);

function drawHead() {
  byId("name").textContent = document.title;
  byId("subtitle").textContent = [...(data.method ? [data.method] : []), fact.estimator, fact.model, fact["data set"], fact.status].join(" \u00b7 ");
  const size = epochs.epoch.length;
  const numbers = [];
  if (heldOut) {
    const { step, accuracy } = heldOut, last = step.length - 1, best = accuracy.indexOf(Math.max(...accuracy));
    const name = (i) => `${i === best && last ? "best " : ""}held-out accuracy, step ${whole(step[i])}`;
    for (const i of new Set([0, last, best])) numbers.push([name(i), percent(accuracy[i])]);
  }
  if (size) {
    const success = (e) => [`training success, epoch ${whole(epochs.epoch[e])}`, percent(epochs.success_rate[e])];
    numbers.push(success(0), ...(size > 1 ? [success(size - 1)] : []));
    numbers.push(["zero-variance groups", percent(steps.zero_variance_groups / steps.groups)]);
    if (steps.zero_variance_groups) numbers.push(["of these rescued", percent(steps.rescued_groups / steps.zero_variance_groups)]);
  }
  numbers.push(["prompts", whole(data.all_prompts)], ["groups of rollouts", whole(steps.groups)]);
  byId("numbers").append(...numbers.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function drawCurves() {
  byId("pruned").hidden = steps.first <= 1;
  byId("pruned").textContent = `The history before step ${whole(steps.first)} is no longer in the store; this page shows what was kept.`;
  const rates = data.unit ? { low: 0, high: 1 } : {};
  const share = { format: percent, axis: (value) => `${Math.round(100 * value)}%`, low: 0, high: 1 };
  const reward = data.unit ? { ...share } : { format: decimal };
  const overEpochs = { x: epochs.epoch, xLabel: "epoch", nameOf: (i) => `epoch ${whole(epochs.epoch[i])}` };
  const { step, span } = steps;
  const curves = (of) => [{ name: "success rate", y: of.success_rate }, { name: "posterior mean", y: of.mean }];
  const zeroVariance = (of) => [{ name: "zero variance", y: of.zero_variance }, { name: "rescued", y: of.rescued }];
  if (heldOut) {
    byId("held-out").hidden = false;
    lineChartOverSteps(byId("held-out"), { title: `Held-out accuracy, ${whole(heldOut.prompts)} prompts \u00d7 ${whole(heldOut.samples)} samples`,
      ...reward, step: heldOut.step, lines: [{ name: "held-out accuracy", y: heldOut.accuracy }] });
  }
  lineChartOverSteps(byId("by-step"), { title: "During training", step, span, ...reward, ...rates, lines: curves(steps) });
  lineChart(byId("by-epoch"), { title: "By epoch", ...overEpochs, ...reward, ...rates, lines: curves(epochs) });
  lineChartOverSteps(byId("zero-variance-by-step"), { title: "Share of the groups", step, span, ...share, lines: zeroVariance(steps) });
  lineChart(byId("zero-variance-by-epoch"), { title: "Share of the groups, by epoch", ...overEpochs, ...share, lines: zeroVariance(epochs) });
  byId("groups-note").textContent =
    "A group has zero variance if all its rewards are the same: its own mean and deviation give no advantage. It is rescued if " +
    (data.usage ? "it was trained on with an advantage anyway. " : "the variance it was scored with is above 0 anyway. ") +
    `Here ${whole(steps.zero_variance_groups)} of ${whole(steps.groups)} groups, ${whole(steps.rescued_groups)} rescued.`;
  const bins = epochs.bins;
  const chosen = evenly(epochs.epoch.length, 6);
  const counts = chosen.map((e) => epochs.histogram.subarray(e * bins, (e + 1) * bins));
  const tallest = Math.max(...counts.map((values) => Math.max(...values)));
  byId("histograms").append(...chosen.map((e, i) => {
    const host = element("figure");
    histogram(host, `Epoch ${whole(epochs.epoch[e])} \u00b7 ${whole(epochs.prompts[e])} prompts`, counts[i], tallest);
    return host;
  }));
  if (data.probes) {
    const probes = unpackAll(data.probes);
    byId("probes").hidden = false;
    byId("probes-note").textContent =
      `Mean squared error of the estimates, in squared reward, against ${whole(probes.samples)} extra rollouts of ` +
      `${whole(probes.groups)} groups that were never trained on, with these rollouts' own noise subtracted; values below 0 are due to chance.`;
    lineChartOverSteps(byId("probe-errors"), { title: "Mean squared error", step: probes.step, format: decimal,
      low: Math.min(0, ...probes.estimate, ...probes.group),
      lines: [{ name: "stored estimate", y: probes.estimate }, { name: "group's own mean S / N", y: probes.group }] });
  }
  byId("shared").hidden = !data.shared.length;
  byId("shared-charts").append(...data.shared.map((series) => {
    const host = element("figure");
    lineChartOverSteps(host, { title: series.name, step: unpack(series.step), format: decimal, lines: [{ name: series.name, y: unpack(series.value) }] });
    return host;
  }));
}

function drawStates() {
  const { mastered, forgotten, impossible } = data.states;
  const meanings = [
    `posterior mean of ${mastered} or more after the last visit.`,
    "none of the others: solved sometimes.",
    `posterior mean at least ${forgotten} below the highest it had after an earlier visit.`,
    `not one success so far, and a posterior mean of ${impossible} or less.`,
    "known only from the warm start, or its visits are no longer in the store.",
  ];
  STATES.forEach((name, s) => {
    const count = data.state_counts[s];
    if (s === 4 && !count) return;
    byId("definitions").append(element("div", {}, swatch(stateClass(s)),
      element("dt", {}, `${name}: ${whole(count)} (${percent(count / Math.max(1, data.all_prompts))}) `,
        element("button", { type: "button", class: "link", onclick: () => filterBy(s), "aria-label": `List the prompts of state ${name}` }, "list them")),
      element("dd", {}, meanings[s])));
  });
  if (!data.unit) byId("definitions").append(element("p", { class: "note" }, "These thresholds are meant for rewards in [0, 1]; this run has rewards outside that range."));
  if (epochs.epoch.length) stateBars(byId("state-bars"));
}

function drawMovers() {
  const rowOf = new Map(Array.from(prompts.id, (id, row) => [id, row]));
  for (const list of ["improved", "regressed"]) {
    byId(list).append(...data[list].map((id) => {
      const row = rowOf.get(id), last = prompts.mean[row];
      const figures = `${(last - prompts.change[row]).toFixed(2)} \u2192 ${last.toFixed(2)} (${signed(prompts.change[row])})`;
      return element("li", {}, element("button", { type: "button", onclick: () => openPrompt(row) },
        element("span", { class: "figures" }, figures), element("span", { class: "text", dir: "auto" }, brief(row))));
    }));
    if (!data[list].length) byId(list).append(element("li", { class: "note" }, "None yet."));
  }
}

function drawRun() {
  const pairs = (list) => list.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  byId("facts").append(...pairs(data.facts));
  byId("config").append(...pairs(data.config));
  byId("lineage").append(...data.lineage.map(([relation, name, text]) => element("li", {}, `${relation}: `, element("strong", {}, name), ` (${text})`)));
  byId("events").append(...data.events.map(([when, kind, from, to]) =>
    element("li", {}, `${when} ${kind.replaceAll("_", " ")}, ` + (from === to ? `at step ${whole(to)}` : `from step ${whole(from)} to ${whole(to)}`))));
  if (!data.events.length) byId("events").append(element("li", {}, "None."));
}

drawHead();
setUpAxis();
if (data.usage) drawRollouts();
if (steps.groups) drawCurves();
if (!data.unit) byId("means").hidden = true; // its bins are of [0, 1]
if (!steps.groups) for (const id of ["curves", "means", "groups", "movers"]) byId(id).hidden = true;
drawStates();
drawMovers();
drawRun();
setUpTable();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
