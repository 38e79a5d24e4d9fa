// Which metrics are drawn together. `*` stands for a part that varies; a chart is shown where a run has any of its metrics.

const share = { range: [0, 1] };

export const GROUPS = [
  {
    title: "Learning",
    charts: [
      { title: "Reward", keys: ["reward"], about: "Mean reward of a batch; points are evaluations." },
      { title: "Parts of the reward", keys: ["rewards/*/mean"], about: "Mean of each reward function." },
      { title: "How attempts end", keys: ["stop/*"], ...share, about: "Share of attempts that ended for each reason." },
      { title: "Turns", keys: ["turns/mean"], about: "Turns per attempt." },
      { title: "Spread of the reward", keys: ["reward_std"], about: "Standard deviation of the reward." },
      { title: "Entropy", keys: ["entropy"], about: "Entropy of the policy, in nats per token." },
      { title: "Length", keys: ["completions/mean_length", "completions/max_length"], about: "Tokens per attempt, tool results included." },
    ],
  },
  {
    title: "Tools",
    charts: [
      { title: "Calls", keys: ["tools/call_frequency"], about: "Tool calls per attempt." },
      { title: "Calls that could be made", keys: ["tools/valid_rate", "tools/failure_frequency"], ...share, about: "Valid calls, and calls that did not succeed, as shares." },
      { title: "What calls came back as", keys: ["tools/kind/*"], ...share, about: "Share of calls by the kind of their result." },
      { title: "Errors by tool", keys: ["tools/by_name/*/error_rate"], ...share, about: "Share of the calls of each tool that did not succeed." },
      { title: "Calls by tool", keys: ["tools/by_name/*/calls"], about: "Number of calls of each tool in a batch." },
      { title: "Seconds per call", keys: ["tools/seconds"], about: "Without waiting in a queue." },
      { title: "Repaired, cut, sent again", keys: ["tools/repaired_rate", "tools/cut_rate", "tools/retried_rate"], about: "Shares of calls." },
    ],
  },
  {
    title: "Optimisation health",
    charts: [
      { title: "Mask", keys: ["mask/in_loss_fraction", "mask/masked_fraction", "mask/forced_fraction", "mask/straddling_fraction", "mask/relaxed_fraction"], ...share, about: "Shares of the sampled tokens: in the loss, masked, syntax, both, and brought back by the floors." },
      { title: "Ratios", keys: ["ratio/p10", "ratio/p50", "ratio/p90", "ratio/mean"], bounds: "ratio", about: "Policy to sampler, over the tokens in the loss. Lines: where it is clipped." },
      { title: "Histogram of ratios", kind: "histogram", keys: ["ratio/histogram/*"], about: "Share of the tokens in the loss by their ratio, with the bounds of clip and gate. Heights are square roots, so that small shares show." },
      { title: "KL divergence", keys: ["kl/active", "kl/forced", "kl/all"], bounds: "kl", about: "From the reference, in nats per token. Lines: target and cap." },
      { title: "Weight of the KL term", keys: ["kl/beta"], about: "It rises while the divergence is over its target." },
      { title: "Passes over the KL cap", keys: ["kl/hard_cap_hits"], ...share, about: "Share of passes without a policy term." },
      { title: "Alignment", keys: ["align/score"], about: "Share of tokens on whose log-probability sampler and trainer agree." },
      { title: "Difference of sampler and trainer", keys: ["align/logp_mae"], about: "Mean, in nats." },
      { title: "Active and clipped", keys: ["loss/active_fraction", "mask/in_loss_fraction", "clip_ratio/region_mean", "ratio/gated_fraction"], ...share, about: "Tokens that are learnt from, that the loss sees, that are clipped, and that are gated." },
      { title: "Policy loss", keys: ["loss/policy"], about: "With one update per batch it is near 0 by construction; the gradient is not." },
      { title: "Value loss", keys: ["value/loss"], about: "Loss of the value head." },
      { title: "Explained variance", keys: ["value/explained_variance", "value/ev_vs_group"], about: "How well values predict returns: 1 is exact. Against the group's baseline: above 0 is better." },
      { title: "Values and returns", keys: ["value/mean", "value/return_mean"], about: "Means at the first token of a turn." },
      { title: "Weight of the values", keys: ["value/mixing_weight"], ...share, about: "Against the group's baseline." },
      { title: "Distance of the reference", keys: ["ref/distance"], about: "How far its weights are from those of the policy." },
      { title: "Effective sample size", keys: ["ratio/ess"], about: "As a share of the tokens." },
      { title: "Groups without spread", keys: ["frac_reward_zero_std", "groups/flat_fraction", "groups/flat_fraction_refilled"], ...share, about: "All attempts have the same reward: nothing to learn from." },
      { title: "Norm of the gradient", keys: ["grad_norm"], about: "Before clipping." },
      { title: "Learning rate", keys: ["learning_rate"], about: "" },
    ],
  },
  {
    title: "Time and machine",
    charts: [
      { title: "Seconds by phase", keys: ["profile/*_seconds", "rollout/seconds", "step_time", "sampler/sync_seconds", "rollout/wait_seconds"], about: "Of a step." },
      { title: "Tokens per second", keys: ["rollout/tokens_per_second"], about: "Sampled, per process." },
      { title: "Seconds per attempt", keys: ["rollout/trajectory_seconds", "rollout/queue_seconds"], about: "Under way, and waiting for a place." },
      { title: "Staleness", keys: ["rollout/staleness", "rollout/staleness_max"], about: "Updates between the beginning of an attempt and its use." },
      { title: "GPU memory", keys: ["gpu/memory_gib", "profile/*_peak_gib"], about: "In GiB." },
      { title: "GPU use", keys: ["gpu/utilization"], about: "Share of the time in which it worked." },
      { title: "Failed and left out", keys: ["rollout/failed_fraction", "rollout/left_out_fraction"], about: "Shares of attempts." },
    ],
  },
];

const patterns = new Map();

export function matches(pattern, key) {
  if (!patterns.has(pattern)) {
    const escaped = pattern.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    patterns.set(pattern, new RegExp(`^${escaped.join("([^/]+)")}$`));
  }
  return patterns.get(pattern).exec(key);
}

// Name of a metric in the legend of its chart: the part that varies, or the whole key.
export function label(key, patternsOfChart) {
  for (const pattern of patternsOfChart) {
    const found = matches(pattern, key);
    if (found) return found[1] ?? key;
  }
  return key;
}

export function isDrawn(key) {
  return GROUPS.some((group) => group.charts.some((chart) => chart.keys.some((pattern) => matches(pattern, key))));
}
