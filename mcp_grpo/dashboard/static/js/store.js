// What the server has told so far: the runs, and the metrics of those that are looked at. Only what is new is asked for.
import { ask } from "./dom.js";

export const store = { runs: [], folder: "", metrics: new Map(), isLoaded: false };

export async function refreshRuns() {
  const { runs, folder } = await ask("runs");
  Object.assign(store, { runs, folder, isLoaded: true });
}

export function run(name) {
  return store.runs.find((each) => each.name === name);
}

// Returns whether anything is new.
export async function refreshMetrics(name) {
  const known = store.metrics.get(name);
  const answer = await ask("metrics", { run: name, generation: known?.generation, from: known?.count });
  const isNew = !known || known.generation !== answer.generation || answer.start !== known.count;
  const series = isNew ? new Map() : known.series;
  for (const [key, [steps, values]] of Object.entries(answer.series)) {
    if (!series.has(key)) series.set(key, { steps: [], values: [] });
    const found = series.get(key);
    for (let i = 0; i < steps.length; i++) {
      found.steps.push(steps[i]);
      found.values.push(values[i]);
    }
  }
  store.metrics.set(name, { generation: answer.generation, count: answer.count, step: answer.step, ahead: answer.ahead, series });
  return isNew || Object.keys(answer.series).length > 0 || JSON.stringify(known.ahead) !== JSON.stringify(answer.ahead);
}
