"use strict";
// Number formats and tick positions; ticks.py has the same rules for images.

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"]];
const SMALL = [[1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
const BINARY = [[2 ** 40, "Ti"], [2 ** 30, "Gi"], [2 ** 20, "Mi"], [2 ** 10, "Ki"]];

function plain(value, digits) {
  const size = Math.abs(value);
  if (size > 0 && size < 1e-4) return String(Number(value.toPrecision(digits)));
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

function prefixed(value, prefixes) {
  const fallback = prefixes.at(-1)[0] > 1 ? [1, ""] : prefixes.at(-1);
  // Rounding can make a tick at 1e-6 into 9.9999e-7.
  const [unit, prefix] = prefixes.find(([least]) => Math.abs(value) >= least * 0.9999) ?? fallback;
  return `${plain(value / unit, 4)} ${prefix}`.trimEnd();
}

/** Format a tick label: 1,234, 2.5 M, 0.05 or 2e-5; for bytes, 64 Ki; for seconds, 300 µ. */
function axisNumber(value, numbers = "plain") {
  const size = Math.abs(value);
  if (numbers === "bytes") return prefixed(value, BINARY);
  if (size >= 1e6) return prefixed(value, LARGE);
  if (numbers === "seconds" && size > 0 && size < 0.9999e-3) return prefixed(value, SMALL);
  return plain(value, size >= 1e3 ? 6 : 4);
}

/** Format a value for read-outs and tables, with as many digits as the page's data has. */
function readNumber(value) {
  return value == null ? "–" : plain(value, Math.abs(value) >= 1e4 ? 9 : 5);
}

/** Return the powers of a base from low to high; only every n-th one if there are more than `most`. */
function powers(low, high, base, most) {
  const log = (value) => Math.log(value) / Math.log(base);
  const first = Math.ceil(log(low) - 1e-9), last = Math.floor(log(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const places = [];
  for (let power = first; power <= last; power += step) places.push(base ** power);
  return places;
}

/** Return the ticks between low and high at 1, 2 and 5 times each power of ten. */
function decades(low, high) {
  const places = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) places.push(digit * 10 ** power);
  }
  return places.filter((place) => place >= low && place <= high);
}

/** Return about `most` round ticks of a linear axis; integers for counts, such as epochs. */
function roundPlaces(low, high, most, isCount = false) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  const step = isCount ? Math.max(1, round) : round;
  const places = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    places.push(Number((index * step).toPrecision(12)));
  }
  return places;
}

/** Return the labeled ticks of an axis, about `most` or fewer. */
function axisPlaces(scale, low, high, numbers, most, isCount) {
  if (scale === "linear") return roundPlaces(low, high, most, isCount);
  const isBinary = scale === "log2" && (numbers === "bytes" || high < 1024);
  const fine = isBinary ? powers(low, high, 2, most) : decades(low, high);
  if (fine.length < 3) return roundPlaces(low, high, Math.min(most, 5)).filter((place) => place > 0);
  return fine.length <= most ? fine : powers(low, high, 10, most);
}
