// Format durations, bytes and rates as fsdp_inspect.formatting does.

// From this fraction of a unit on, three digits round to the unit: 999.6 µs is 1.00 ms.
const ROUNDS_UP = 0.9995;

function threeDigits(value) {
  const magnitude = Math.abs(value);
  if (magnitude >= 99.95) return Math.round(value).toLocaleString("en-US");
  return magnitude >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, steps, fallback) {
  for (const [size, suffix] of steps) {
    if (Math.abs(value) >= size * ROUNDS_UP) return `${threeDigits(value / size)} ${suffix}`;
  }
  return fallback;
}

function formatNs(value) {
  const steps = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
  return scaled(value, steps, `${value.toFixed(0)} ns`);
}

function formatBytes(value) {
  const steps = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  return scaled(value, steps, `${value.toFixed(0)} B`);
}

function formatRate(value) {
  const steps = [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]];
  return scaled(value, steps, `${value.toFixed(0)} B/s`);
}

// The length between two ticks of the axis that suits a window.
function tickLength(viewLength, pixels) {
  const wanted = (viewLength * 110) / pixels;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * power >= wanted);
  return factor * power;
}

// All ticks of a step have one unit, whatever the zoom, so that they compare.
function formatTick(time, step, axisEnd) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const [size, suffix] = units.find(([candidate]) => axisEnd >= 10 * candidate) || units[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(time / size).toFixed(digits)} ${suffix}`;
}

// A name, or what of it tells units apart: the end of `layers.7`, the beginning of `norm, lm_head`.
function shortened(pen, name, room) {
  const fits = (text) => pen.measureText(text).width <= room;
  if (!name || fits(name)) return name;
  const segments = /^[\w.]+$/.test(name) ? name.split(".") : [name];
  for (let first = 1; first < segments.length; first += 1) {
    const end = segments.slice(first).join(".");
    if (fits(end)) return end;
  }
  for (let kept = name.length - 1; kept >= 4; kept -= 1) {
    if (fits(`${name.slice(0, kept)}…`)) return `${name.slice(0, kept)}…`;
  }
  return "";
}
