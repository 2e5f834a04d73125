// Times and money as the rest of RubberBand writes them.
const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
const DURATION = /^(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$/;

export function duration(seconds) {
  if (seconds < 0) return `-${duration(-seconds)}`;
  const rounded = seconds >= 9.5 ? Math.round(seconds) : seconds;
  if (rounded < 59.95) return `${Number(rounded.toPrecision(3))}s`;
  let left = Math.round(rounded);
  let text = "";
  for (const [unit, seconds_of] of UNITS) {
    const count = Math.floor(left / seconds_of);
    left -= count * seconds_of;
    if (count) text += `${count}${unit}`;
  }
  return text;
}

// A deadline as a field holds it: nothing of it is lost that the slider can tell apart.
export function exactly(seconds) {
  if (seconds >= 59.95) return duration(seconds);
  return `${Number(seconds.toFixed(1))}s`;
}

// Seconds of 90s, 1h30m or a plain number; null for what is none (an instant, or a slip).
export function seconds_of(text) {
  const compact = text.replaceAll(" ", "");
  if (/^\d+(\.\d+)?$/.test(compact)) return Number(compact);
  const match = compact ? DURATION.exec(compact) : null;
  return match && UNITS.reduce((sum, [, unit_s], at) => sum + Number(match[at + 1] ?? 0) * unit_s, 0);
}

// Amounts that stand below each other have the decimals of the largest one.
export function usd(amount, largest = amount) {
  const size = Math.abs(largest);
  const decimals = size >= 1 || size === 0 ? 2 : size >= 0.01 ? 4 : 6;
  return amount.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

// From when to when a pool's instances are promised, as seen now; instants are Unix time.
export function promised({ start_at, end_at }) {
  const now = Date.now() / 1000;
  const starts = start_at <= now + 1 ? "now" : `in ${duration(start_at - now)}`;
  const clock = new Date(1000 * end_at).toLocaleString("en-GB", {
    ...(end_at - now < 12 * 3600 ? {} : { day: "numeric", month: "short" }), hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  return `starts ${starts}, ends by ${clock} (in ${duration(Math.max(0, end_at - now))})`;
}

// An amount that a limit may be set to without cutting the plan off.
export function usd_above(amount) {
  const unit = amount >= 1 ? 100 : 10000;
  return String(Math.ceil(amount * unit - 1e-6) / unit);
}

// A deadline that a plan of so many seconds keeps, in words.
export function deadline_above(seconds) {
  return seconds >= 9.5 ? duration(Math.ceil(seconds - 1e-6)) : `${Math.ceil(seconds * 10 - 1e-6) / 10}s`;
}

export function difference(actual, planned) {
  if (!(planned > 0)) return "";
  const percent = (actual / planned - 1) * 100;
  const text = percent.toFixed(Math.abs(percent) >= 9.95 ? 0 : 1);
  if (Number(text) === 0) return "0 %";
  return `${percent > 0 ? "+" : "−"}${text.replace("-", "")} %`;
}

export function percent(share) {
  return `${Number((100 * share).toFixed(share > 0.99 && share < 1 ? 1 : 0))} %`;
}

export function counted(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

export function gpus_each(stage) {
  return stage.trials_per_gpu ? `${stage.gpus_per_trial}/${stage.trials_per_gpu}` : String(stage.gpus_per_trial);
}

export function place_of(stage) {
  return stage.place ?? "GPU";
}

export function time_unit(horizon_s) {
  if (horizon_s <= 180) return ["seconds", 1];
  return horizon_s <= 3 * 3600 ? ["minutes", 60] : ["hours", 3600];
}
