// ---- where the rollouts went

const PARTS = [
  { key: "mixed", name: "mixed", className: "mixed", meaning: "trained on, in a group whose rewards differ, so that it has advantages by itself." },
  { key: "rescued", name: "rescued", className: "rescued", meaning: "trained on, in a zero-variance group to which the posterior gave advantages." },
  { key: "no_advantage", name: "no advantage", className: "no-advantage", meaning: "trained on, in a group without any advantage: generated for nothing." },
  { key: "filtered", name: "filtered out", className: "filtered", meaning: "generated and not trained on: rejected by the method, or more than the batch holds." },
];

function drawRollouts() {
  const usage = unpackAll(data.usage), total = usage.totals;
  byId("usage").hidden = byId("usage-link").hidden = false;
  const of = (part, all) => all ? ` (${percent(part / all)})` : "";
  const sums = { mixed: total.informative - total.rescued, rescued: total.rescued, no_advantage: total.trained - total.informative, filtered: total.filtered };
  const cost = (value, format) => value === null ? "-" : format(value);
  const numbers = [
    ["rollouts generated", whole(total.generated)],
    ["trained on", whole(total.trained)],
    ["filtered out", whole(total.filtered)],
    ["replayed", whole(total.replayed)],
    ["prompts skipped", whole(total.skipped)],
    ["tokens generated", whole(total.generated_tokens)],
    ["informative groups", total.groups ? percent(total.informative_groups / total.groups) : "-"],
    ["rollouts per informative group", cost(usage.rollouts_per_group, decimal)],
    ["tokens per informative group", cost(usage.tokens_per_group, whole)],
    ...(total.unused_rollouts ? [["unused at the end", whole(total.unused_rollouts)]] : []),
  ];
  byId("usage-numbers").append(...numbers.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  byId("usage-note").textContent =
    "A group is informative if some advantage in it is not 0: its rewards are mixed, or the posterior rescued it. Its cost: everything that was generated, whatever became of it, divided by the number of informative groups." +
    (usage.recorded_steps < usage.step[usage.step.length - 1] ? ` The usage of only ${whole(usage.recorded_steps)} steps was recorded.` : "");
  byId("usage-parts").append(...PARTS.map(({ key, name, className, meaning }) => element("div", {}, swatch(className),
    element("dt", {}, `${name}: ${whole(sums[key])}${of(sums[key], total.generated)}`), element("dd", {}, meaning))));
  const perStep = (key) => Array.from(usage[key], (count, i) => usage.steps[i] ? count / usage.steps[i] : 0);
  const { step, span } = usage;
  stackedBarsOverSteps(byId("usage-by-step"), { title: "Rollouts generated per step", step, span, parts: PARTS.map((part) => ({ ...part, y: perStep(part.key) })) });
  const beside = [["replayed", "rollouts replayed"], ["skipped", "prompts skipped"]].filter(([key]) => total[key]);
  if (!beside.length) return;
  const lines = beside.map(([key, name]) => ({ name, y: perStep(key) })), names = beside.map(([, name]) => name).join(", ");
  byId("usage-beside").hidden = false;
  lineChartOverSteps(byId("usage-beside"), { title: `Per step: ${names}`, step, span, format: decimal, low: 0, lines });
}
