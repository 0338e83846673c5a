"use strict";
// How numbers are written, and where an axis is marked; the images follow the same rules (ticks.py).

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"]];
const SMALL = [[1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
const BINARY = [[2 ** 40, "Ti"], [2 ** 30, "Gi"], [2 ** 20, "Mi"], [2 ** 10, "Ki"]];

function plain(value, digits) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** A number of an axis: 1,234, 2.5 M, 0.05, 300 µ. */
function axisNumber(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const prefixes = size >= 1e6 ? LARGE : size < 1e-3 ? SMALL : [];
  // A tick may be 9.9999e-7 where 1e-6 is meant.
  const [unit, prefix] = prefixes.find(([least]) => size >= least * 0.9999) ?? prefixes.at(-1) ?? [1, ""];
  return `${plain(value / unit, size >= 1e3 && unit === 1 ? 6 : 4)} ${prefix}`.trimEnd();
}

/** A number of bytes: 512, 64 Ki, 1 Mi. */
function binaryNumber(value) {
  const [unit, prefix] = BINARY.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${plain(value / unit, 4)} ${prefix}`.trimEnd();
}

/** A value as a read-out and a table have it: as many digits as the page's data has. */
function readNumber(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size >= 1e9 || (size > 0 && size < 1e-3) ? axisNumber(value) : plain(value, size >= 1e4 ? 7 : 5);
}

/** Powers of a base from low to high, every n-th of them if they are more than `most`. */
function powers(low, high, base, most) {
  const log = (value) => Math.log(value) / Math.log(base);
  const first = Math.ceil(log(low) - 1e-9), last = Math.floor(log(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const places = [];
  for (let power = first; power <= last; power += step) places.push(base ** power);
  return places;
}

/** Places between low and high at 1, 2 and 5 of each decade. */
function decades(low, high) {
  const places = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) places.push(digit * 10 ** power);
  }
  return places.filter((place) => place >= low && place <= high);
}

/** The places of a linear axis: about `most` round numbers. */
function roundPlaces(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  const places = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    places.push(Number((index * step).toPrecision(12)));
  }
  return places;
}

/** The places of an axis that get a number, at most about `most`. */
function axisPlaces(scale, low, high, isBytes, most) {
  if (scale === "linear") return roundPlaces(low, high, most);
  if (high / low < 4) return roundPlaces(low, high, Math.min(most, 5)).filter((place) => place > 0);
  if (scale === "log2" && (isBytes || high < 1024)) return powers(low, high, 2, most);
  const fine = decades(low, high);
  return fine.length <= most ? fine : powers(low, high, 10, most);
}
