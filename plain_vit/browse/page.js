// A map of images, the chosen one with its neighbours, and a list. Texts of the data become text nodes only.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const unpacked = (text) => (text === null ? null : Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
const array = (Kind, text) => (text === null ? null : new Kind(unpacked(text)));

const COUNT = data.count;
const PLACES = array(Uint16Array, data.places);
const NEIGHBOURS = array(Uint32Array, data.neighbours);
const SIMILARITIES = array(Int16Array, data.similarities);
const LABELS = { true: array(Int32Array, data.true), predicted: array(Int32Array, data.predicted) };
const PROBABILITY = array(Float32Array, data.probability);
const BROKEN = new Set(data.broken);
const PATHS = data.paths.map((path) => (path === null ? null : data.prefix + path));
const LOWER = PATHS.map((path) => (path === null ? "" : path.toLowerCase()));
const PAGE_SIZE = 60; // images added to the list at once
const MOST_COLOURS = 12;
const REACH = 22; // pixels from a point within which it is chosen
const TILE_ON_MAP = 46;
const CELL = TILE_ON_MAP + 4; // of the grid in which thumbnails are drawn on the map
const format = new Intl.NumberFormat("en");

const state = { chosen: -1, listed: PAGE_SIZE, matching: new Uint8Array(COUNT), order: [], colours: null };
const view = { x: 0.5, y: 0.5, scale: 1, pictures: false };

// What is known of an image

const has = (what) => LABELS[what] !== null;
const labelOf = (what, i) => (has(what) && LABELS[what][i] >= 0 ? data.classes[LABELS[what][i]] : null);
const nameOf = (i) => (PATHS[i] !== null ? PATHS[i].slice(PATHS[i].search(/[^/\\]*$/)) : `row ${rowOf(i)}`);
const rowOf = (i) => (data.rows === null ? i : data.rows[i]);
const isKnown = (i) => has("true") && has("predicted") && LABELS.true[i] >= 0 && LABELS.predicted[i] >= 0;
const isWrong = (i) => isKnown(i) && LABELS.true[i] !== LABELS.predicted[i];
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function described(i) {
  const [truth, predicted] = [labelOf("true", i), labelOf("predicted", i)];
  const parts = [nameOf(i)];
  if (truth !== null) parts.push(predicted === null ? truth : `true label ${truth}`);
  if (predicted !== null) parts.push(`predicted ${predicted} with ${percent(PROBABILITY[i])}`);
  if (isWrong(i)) parts.push("a mistake");
  return parts.join(", ");
}

// Thumbnails

const sheets = new Map();

function sheetOf(i) {
  const file = data.thumbnails.files[Math.floor(i / data.thumbnails.perFile)];
  if (!sheets.has(file)) {
    const image = new Image();
    image.decoding = "async";
    image.onload = draw;
    image.src = file;
    sheets.set(file, image);
  }
  return sheets.get(file);
}

function placeOf(i) {
  const within = i % data.thumbnails.perFile;
  return [within % data.thumbnails.columns, Math.floor(within / data.thumbnails.columns)];
}

function showTile(tile, i) {
  const missing = data.thumbnails === null || BROKEN.has(i);
  tile.classList.toggle("blank", missing);
  tile.textContent = missing && data.thumbnails !== null ? "unreadable" : "";
  tile.style.backgroundImage = "";
  if (missing) return;
  const { columns, perFile, files } = data.thumbnails;
  const first = Math.floor(i / perFile);
  const rows = Math.ceil(Math.min(perFile, COUNT - first * perFile) / columns);
  const [column, row] = placeOf(i);
  tile.style.backgroundImage = `url("${files[first]}")`;
  tile.style.backgroundSize = `${columns * 100}% ${rows * 100}%`;
  tile.style.backgroundPosition = `${(column / (columns - 1)) * 100}% ${rows > 1 ? (row / (rows - 1)) * 100 : 0}%`;
}

function tileButton(i, texts) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.image = i;
  button.title = PATHS[i] ?? nameOf(i);
  button.setAttribute("aria-label", [described(i), ...texts.map((each) => each.said).filter(Boolean)].join(", "));
  const tile = document.createElement("div");
  tile.className = "tile";
  showTile(tile, i);
  button.append(tile);
  for (const { text, kind } of texts) {
    const line = document.createElement("span");
    line.textContent = text;
    line.className = kind;
    button.append(line);
  }
  item.append(button);
  return item;
}

function captions(i) {
  const [truth, predicted] = [labelOf("true", i), labelOf("predicted", i)];
  if (predicted !== null) {
    const lines = [{ text: `${percent(PROBABILITY[i])} ${predicted}`, kind: isWrong(i) ? "wrong" : "" }];
    return truth === null ? lines : [...lines, { text: isWrong(i) ? `is ${truth}` : "correct", kind: "quiet" }];
  }
  return [{ text: truth ?? nameOf(i), kind: "" }];
}

// Which images are shown, and in which order

const ORDERS = {
  similar: ["similar together", (a, b) => a - b],
  path: ["by path", (a, b) => (LOWER[a] < LOWER[b] ? -1 : LOWER[a] > LOWER[b] ? 1 : rowOf(a) - rowOf(b))],
  most: ["most confident first", (a, b) => PROBABILITY[b] - PROBABILITY[a] || a - b],
  least: ["least confident first", (a, b) => PROBABILITY[a] - PROBABILITY[b] || a - b],
};

function fillSelect(id, options, label) {
  const select = element(id);
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.closest("label").hidden = options.length < 2;
  if (label) select.closest("label").firstChild.textContent = label;
}

function countsOf(what) {
  const counts = new Array(data.classes.length).fill(0);
  for (const label of LABELS[what]) if (label >= 0) counts[label] += 1;
  return counts;
}

function fillControls() {
  for (const what of ["true", "predicted"]) {
    const counts = has(what) ? countsOf(what) : [];
    const classes = data.classes.map((name, number) => [number, `${name} (${format.format(counts[number])})`]);
    const options = has(what) ? [["", "all"], ...classes.filter(([number]) => counts[number] > 0)] : [];
    fillSelect(what, options, what === "true" && !has("predicted") ? "Label " : null);
  }
  const both = has("true") && has("predicted");
  element("show").closest("label").hidden = !both;
  const colours = [];
  if (both) colours.push(["wrong", "correct or mistake"]);
  if (has("true")) colours.push(["true", has("predicted") ? "true label" : "label"]);
  if (has("predicted")) colours.push(["predicted", "predicted label"]);
  fillSelect("colour", colours);
  if (has("true")) element("colour").value = "true";
  const orders = Object.keys(ORDERS).filter((key) => PROBABILITY !== null || !["most", "least"].includes(key));
  fillSelect("order", orders.map((key) => [key, key === "similar" && PLACES === null ? "by row" : ORDERS[key][0]]));
}

function match() {
  const query = element("query").value.trim().toLowerCase();
  const wanted = { true: element("true").value, predicted: element("predicted").value };
  const show = element("show").value;
  const order = [];
  for (let i = 0; i < COUNT; i += 1) {
    const fits =
      (query === "" || LOWER[i].includes(query)) &&
      ["true", "predicted"].every((what) => !wanted[what] || LABELS[what][i] === Number(wanted[what])) &&
      (show === "all" || (isKnown(i) && isWrong(i) === (show === "wrong")));
    state.matching[i] = fits ? 1 : 0;
    if (fits) order.push(i);
  }
  const [, compare] = ORDERS[element("order").value || "similar"];
  state.order = element("order").value === "similar" ? order : order.sort(compare);
  state.listed = PAGE_SIZE;
  const all = order.length === COUNT;
  element("matching").textContent = all
    ? `${format.format(COUNT)} images`
    : `${format.format(order.length)} of ${format.format(COUNT)} images`;
  element("clear").hidden = all && query === "";
  fillList();
  draw();
}

function fillList() {
  const shown = state.order.slice(0, state.listed);
  element("list").replaceChildren(...shown.map((i) => tileButton(i, captions(i))));
  markCurrent();
  element("more").hidden = state.order.length <= state.listed;
}

function markCurrent() {
  for (const button of document.querySelectorAll("#list [aria-current]")) button.removeAttribute("aria-current");
  const button = document.querySelector(`#list [data-image="${state.chosen}"]`);
  if (button !== null) button.setAttribute("aria-current", "true");
}

// The chosen image

function choose(i, { move = true, say = true } = {}) {
  state.chosen = i;
  element("details").hidden = i < 0;
  element("nothing").hidden = i >= 0;
  markCurrent();
  if (i >= 0) {
    showChosen(i);
    if (move && PLACES !== null) bringIntoView(i);
    if (say) element("said").textContent = described(i);
  }
  draw();
}

function showChosen(i) {
  const tile = document.querySelector("#details .tile");
  showTile(tile, i);
  tile.setAttribute("aria-label", nameOf(i));
  const [truth, predicted] = [labelOf("true", i), labelOf("predicted", i)];
  const facts = [];
  if (PATHS[i] !== null) facts.push(["path", PATHS[i]]);
  if (data.rows !== null) facts.push(["row", format.format(rowOf(i))]);
  if (truth !== null) facts.push([has("predicted") ? "true label" : "label", truth]);
  if (predicted !== null) {
    facts.push(["predicted", `${predicted}, ${percent(PROBABILITY[i])}`, isWrong(i) ? "wrong" : ""]);
  }
  const parts = facts.flatMap(([name, text, kind]) => {
    const [term, value] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    value.textContent = text;
    value.className = kind ?? "";
    return [term, value];
  });
  document.querySelector("#details dl").replaceChildren(...parts);
  if (PLACES === null) return;
  const neighbours = neighboursOf(i).map(([other, similarity]) => {
    const value = similarity.toFixed(3);
    const label = labelOf("predicted", other) ?? labelOf("true", other) ?? nameOf(other);
    const lines = [{ text: value, kind: "", said: `similarity ${value}` }, { text: label, kind: isWrong(other) ? "wrong" : "" }];
    return tileButton(other, lines);
  });
  element("neighbours").replaceChildren(...neighbours);
}

function neighboursOf(i) {
  const found = [];
  for (let place = i * data.perImage; place < (i + 1) * data.perImage; place += 1) {
    found.push([NEIGHBOURS[place], SIMILARITIES[place] / 10000]);
  }
  return found;
}

// The map

const canvas = element("canvas");
const context = canvas.getContext("2d");
const size = { width: 0, height: 0, ratio: 1 };
let dots = null; // the pixels of the canvas
let isDrawing = false;

function bounds() {
  const low = [65535, 65535];
  const high = [0, 0];
  for (let i = 0; i < 2 * COUNT; i += 1) {
    low[i & 1] = Math.min(low[i & 1], PLACES[i]);
    high[i & 1] = Math.max(high[i & 1], PLACES[i]);
  }
  return { low: low.map((each) => each / 65535), high: high.map((each) => each / 65535) };
}

const BOUNDS = PLACES === null ? null : bounds();

function showAll() {
  const [width, height] = [0, 1].map((axis) => Math.max(BOUNDS.high[axis] - BOUNDS.low[axis], 1e-3));
  view.scale = Math.min((size.width - 48) / width, (size.height - 48) / height);
  [view.x, view.y] = [0, 1].map((axis) => (BOUNDS.high[axis] + BOUNDS.low[axis]) / 2);
  view.whole = view.scale;
}

const toScreen = (i) => [
  (PLACES[2 * i] / 65535 - view.x) * view.scale + size.width / 2,
  (view.y - PLACES[2 * i + 1] / 65535) * view.scale + size.height / 2,
];

function bringIntoView(i) {
  const [x, y] = toScreen(i);
  const margin = Math.min(40, size.width / 4, size.height / 4);
  if (x < margin || y < margin || x > size.width - margin || y > size.height - margin) {
    [view.x, view.y] = [PLACES[2 * i] / 65535, PLACES[2 * i + 1] / 65535];
  }
}

function zoomBy(factor, x = size.width / 2, y = size.height / 2) {
  const scale = Math.min(Math.max(view.scale * factor, view.whole / 2), view.whole * 400);
  view.x += (x - size.width / 2) * (1 / view.scale - 1 / scale);
  view.y -= (y - size.height / 2) * (1 / view.scale - 1 / scale);
  view.scale = scale;
  draw();
}

function panBy(x, y) {
  const within = (value, axis) => Math.min(Math.max(value, BOUNDS.low[axis]), BOUNDS.high[axis]);
  view.x = within(view.x - x / view.scale, 0);
  view.y = within(view.y + y / view.scale, 1);
  draw();
}

function nearest(x, y, reach, fits = () => true) {
  let [best, found] = [reach * reach, -1];
  for (let i = 0; i < COUNT; i += 1) {
    const dx = (PLACES[2 * i] / 65535 - view.x) * view.scale + size.width / 2 - x;
    const dy = (view.y - PLACES[2 * i + 1] / 65535) * view.scale + size.height / 2 - y;
    const distance = dx * dx + dy * dy;
    if (distance < best && state.matching[i] && fits(dx, dy, i)) [best, found] = [distance, i];
  }
  return found;
}

const PALETTES = {
  light: ["#2463b0", "#c2570c", "#167d55", "#b3266b", "#7a4fc0", "#8a6a00", "#0b7c8c", "#c02f2f", "#5c6b1f",
    "#3b3f99", "#8c4a2f", "#2d2d2d"],
  dark: ["#7db2ff", "#ffae66", "#6bd6a5", "#ff8fc4", "#c3a6ff", "#e6cc55", "#62d3e3", "#ff8f8a", "#bfd07a",
    "#a9b4ff", "#d9a98f", "#f2f2f2"],
};
const dark = matchMedia("(prefers-color-scheme: dark)");

function palette() {
  const isDark = dark.matches;
  return {
    classes: PALETTES[isDark ? "dark" : "light"],
    other: isDark ? "#a3a9b2" : "#737a84",
    away: isDark ? "#3f444b" : "#d3d6db",
    right: isDark ? "#7db2ff" : "#2463b0",
    wrong: isDark ? "#ff8f8a" : "#c02f2f",
    ink: isDark ? "#ffffff" : "#000000",
    page: isDark ? "#16181b" : "#ffffff",
  };
}

/** Give each image a number of a colour; the legend names the colours. */
function colourImages() {
  const colours = palette();
  const what = element("colour").value;
  const [of, named] = [new Uint8Array(COUNT), []];
  if (what === "wrong") {
    named.push(["correct", colours.right], ["mistake", colours.wrong], ["not known", colours.other]);
    for (let i = 0; i < COUNT; i += 1) of[i] = isKnown(i) ? (isWrong(i) ? 1 : 0) : 2;
  } else if (what) {
    const counts = countsOf(what);
    const frequent = [...counts.keys()].filter((number) => counts[number] > 0);
    frequent.sort((a, b) => counts[b] - counts[a] || a - b).splice(MOST_COLOURS);
    frequent.sort((a, b) => a - b);
    for (const [place, number] of frequent.entries()) named.push([data.classes[number], colours.classes[place]]);
    named.push(["other", colours.other]);
    const numbers = new Map(frequent.map((number, place) => [number, place]));
    for (let i = 0; i < COUNT; i += 1) of[i] = numbers.get(LABELS[what][i]) ?? frequent.length;
  } else {
    named.push(["image", colours.right]);
  }
  state.colours = { of, named };
  const used = new Set(of);
  const items = named.flatMap(([name, colour], number) => (used.has(number) && what ? [legendItem(name, colour)] : []));
  element("legend").replaceChildren(...items);
  draw();
}

function legendItem(name, colour) {
  const item = document.createElement("li");
  const space = "http://www.w3.org/2000/svg";
  const [picture, dot] = ["svg", "circle"].map((kind) => document.createElementNS(space, kind));
  picture.setAttribute("viewBox", "0 0 10 10");
  picture.setAttribute("aria-hidden", "true");
  for (const [key, value] of Object.entries({ cx: 5, cy: 5, r: 4.5, fill: colour })) dot.setAttribute(key, value);
  picture.append(dot);
  item.append(picture, name);
  return item;
}

function draw() {
  if (isDrawing || PLACES === null || size.width === 0) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    drawNow();
  });
}

function drawNow() {
  const colours = palette();
  drawDots(colours);
  context.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  if (data.thumbnails !== null && view.pictures) drawPictures();
  if (state.chosen >= 0) drawChosen(colours);
}

// Dots are written as pixels, which takes a fraction of the time of drawing them one by one.

const packed = (colour) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
};

function mixed(below, above, share) {
  let pixel = 0xff000000;
  for (let shift = 0; shift < 24; shift += 8) {
    const from = (below >>> shift) & 255;
    pixel |= Math.round(from + (((above >>> shift) & 255) - from) * share) << shift;
  }
  return pixel >>> 0;
}

/** Return the pixels of a dot, as offsets from its centre, and how much of each the dot covers. */
function stamp(radius) {
  const reach = Math.ceil(radius);
  const [offsets, shares] = [[], []];
  for (let y = -reach; y <= reach; y += 1) {
    for (let x = -reach; x <= reach; x += 1) {
      const share = Math.min(Math.max(radius + 0.5 - Math.hypot(x, y), 0), 1);
      if (share === 0) continue;
      offsets.push(y * canvas.width + x);
      shares.push(share);
    }
  }
  return { reach, offsets, shares };
}

function drawDots(colours) {
  const pixels = new Uint32Array(dots.data.buffer);
  pixels.fill(packed(colours.page));
  const put = ({ reach, offsets, shares }, colour, i) => {
    const x = Math.round(((PLACES[2 * i] / 65535 - view.x) * view.scale + size.width / 2) * size.ratio);
    const y = Math.round(((view.y - PLACES[2 * i + 1] / 65535) * view.scale + size.height / 2) * size.ratio);
    if (x < reach || y < reach || x >= canvas.width - reach || y >= canvas.height - reach) return;
    const centre = y * canvas.width + x;
    for (let k = 0; k < offsets.length; k += 1) {
      const at = centre + offsets[k];
      pixels[at] = shares[k] === 1 ? colour : mixed(pixels[at], colour, shares[k]);
    }
  };
  const zoomed = Math.min(Math.max(Math.sqrt(view.scale / view.whole), 1), 2);
  const radius = Math.min(Math.max(90 / Math.sqrt(COUNT), 2.2), 6) * zoomed * size.ratio;
  const [near, small] = [stamp(radius), stamp(Math.max(radius * 0.7, 1.5))];
  const { of, named } = state.colours;
  const shades = named.map(([, colour]) => packed(colour));
  const away = packed(colours.away);
  if (state.order.length < COUNT) for (let i = 0; i < COUNT; i += 1) if (!state.matching[i]) put(small, away, i);
  const last = element("colour").value === "wrong" ? 1 : -1; // mistakes are not hidden by what is correct
  for (let i = 0; i < COUNT; i += 1) if (state.matching[i] && of[i] !== last) put(near, shades[of[i]], i);
  for (let i = 0; i < COUNT; i += 1) if (state.matching[i] && of[i] === last) put(near, shades[last], i);
  context.putImageData(dots, 0, 0);
}

/** Draw thumbnails where they do not hide each other: in each cell of a grid the first image. */
function drawPictures() {
  const taken = new Set();
  const unit = view.scale / 65535;
  const [left, top] = [size.width / 2 - view.x * view.scale, size.height / 2 + view.y * view.scale];
  for (let i = 0; i < COUNT; i += 1) {
    if (!state.matching[i] || BROKEN.has(i)) continue;
    const [column, row] = [Math.floor((PLACES[2 * i] * unit) / CELL), Math.floor((PLACES[2 * i + 1] * unit) / CELL)];
    const [x, y] = [left + (column + 0.5) * CELL, top - (row + 0.5) * CELL];
    if (x < -CELL || y < -CELL || x > size.width + CELL || y > size.height + CELL) continue;
    const cell = column * 65536 + row;
    if (taken.has(cell)) continue;
    taken.add(cell);
    drawTile(i, x, y, TILE_ON_MAP);
  }
}

function drawTile(i, x, y, side) {
  const sheet = sheetOf(i);
  if (!sheet.complete || sheet.naturalWidth === 0) return;
  const [column, row] = placeOf(i);
  const tile = data.thumbnails.tile;
  context.drawImage(sheet, column * tile, row * tile, tile, tile, x - side / 2, y - side / 2, side, side);
}

function ring(x, y, radius, colours) {
  for (const [colour, width] of [[colours.page, 5], [colours.ink, 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
  }
}

function drawChosen(colours) {
  const [x, y] = toScreen(state.chosen);
  const places = neighboursOf(state.chosen).map(([other]) => toScreen(other));
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.beginPath();
  for (const [otherX, otherY] of places) {
    context.moveTo(x, y);
    context.lineTo(otherX, otherY);
  }
  context.stroke();
  for (const [otherX, otherY] of places) ring(otherX, otherY, 4, colours);
  ring(x, y, 8, colours);
  if (data.thumbnails === null || BROKEN.has(state.chosen)) return;
  const side = 56;
  const above = y > side + 24 ? y - side / 2 - 18 : y + side / 2 + 18;
  context.fillStyle = colours.ink;
  context.fillRect(x - side / 2 - 4, above - side / 2 - 4, side + 8, side + 8);
  context.fillStyle = colours.page;
  context.fillRect(x - side / 2 - 2, above - side / 2 - 2, side + 4, side + 4);
  drawTile(state.chosen, x, above, side);
}

function fit() {
  const box = element("plane").getBoundingClientRect();
  const first = size.width === 0;
  Object.assign(size, { width: box.width, height: box.height, ratio: Math.min(devicePixelRatio || 1, 2) });
  canvas.width = Math.round(size.width * size.ratio);
  canvas.height = Math.round(size.height * size.ratio);
  if (size.width === 0) return;
  dots = context.createImageData(canvas.width, canvas.height);
  const zoom = first ? 1 : view.scale / view.whole;
  const { x, y } = view;
  showAll();
  if (!first) Object.assign(view, { x, y, scale: view.whole * zoom });
  drawNow();
}

// Mouse, fingers, keys

const fingers = new Map();
let gesture = null;

const placeOn = (event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

function spreadOf() {
  const [[x, y], other] = [...fingers.values()];
  if (!other) return { x, y, length: 0 };
  return { x: (x + other[0]) / 2, y: (y + other[1]) / 2, length: Math.hypot(x - other[0], y - other[1]) };
}

function press(event) {
  canvas.setPointerCapture(event.pointerId);
  hideHint();
  fingers.set(event.pointerId, placeOn(event));
  gesture = { ...spreadOf(), moved: gesture?.moved || fingers.size > 1, path: gesture?.path ?? 0 };
}

function moveFinger(event) {
  if (!fingers.has(event.pointerId)) {
    if (event.pointerType === "mouse") hint(...placeOn(event));
    return;
  }
  fingers.set(event.pointerId, placeOn(event));
  const now = spreadOf();
  gesture.path += Math.hypot(now.x - gesture.x, now.y - gesture.y);
  if (gesture.path > 5) gesture.moved = true;
  if (gesture.moved) {
    hideHint();
    panBy(now.x - gesture.x, now.y - gesture.y);
    if (now.length && gesture.length) zoomBy(now.length / gesture.length, now.x, now.y);
  }
  gesture = { ...gesture, ...now };
}

function lift(event) {
  if (!fingers.delete(event.pointerId)) return;
  if (fingers.size) {
    gesture = { ...gesture, ...spreadOf() };
    return;
  }
  if (!gesture.moved && event.type === "pointerup") choose(nearest(...placeOn(event), REACH), { move: false });
  gesture = null;
}

function hint(x, y) {
  const i = nearest(x, y, 10);
  if (i < 0 || i === state.chosen) return hideHint();
  const box = element("hint");
  box.hidden = false;
  const tile = box.querySelector(".tile");
  tile.hidden = data.thumbnails === null;
  showTile(tile, i);
  box.querySelector("span").textContent = described(i);
  const left = x + 16 + box.offsetWidth > size.width ? x - 16 - box.offsetWidth : x + 16;
  const top = Math.min(Math.max(y - box.offsetHeight / 2, 4), size.height - box.offsetHeight - 4);
  box.style.transform = `translate(${Math.max(left, 4)}px, ${top}px)`;
}

function hideHint() {
  element("hint").hidden = true;
}

const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function go([towardsX, towardsY]) {
  if (state.chosen < 0) {
    choose(nearest(size.width / 2, size.height / 2, Infinity));
    return;
  }
  const [x, y] = toScreen(state.chosen);
  const isAhead = (dx, dy, i) => {
    const [along, aside] = [dx * towardsX + dy * towardsY, Math.abs(dx * towardsY) + Math.abs(dy * towardsX)];
    return i !== state.chosen && along > 0 && along >= aside;
  };
  const next = nearest(x, y, Infinity, isAhead);
  if (next >= 0) choose(next);
}

function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in DIRECTIONS) go(DIRECTIONS[event.key]);
  else if (event.key === "+" || event.key === "=") zoomBy(1.5);
  else if (event.key === "-") zoomBy(1 / 1.5);
  else if (event.key === "0") whole();
  else if (event.key === "Enter" && state.chosen < 0) go([1, 0]);
  else if (event.key === "Enter") document.querySelector("#neighbours button")?.focus();
  else return;
  event.preventDefault();
}

function whole() {
  showAll();
  draw();
}

function chooseFromButton(event) {
  const button = event.target.closest("[data-image]");
  if (button === null) return;
  choose(Number(button.dataset.image));
  if (event.currentTarget === element("neighbours")) document.querySelector("#neighbours button")?.focus();
  else if (innerWidth <= 960) element("chosen").scrollIntoView({ block: "start" });
}

function listen() {
  for (const id of ["query", "true", "predicted", "order"]) element(id).addEventListener("input", match);
  element("show").addEventListener("input", () => {
    if (element("show").value === "wrong") element("order").value = "most";
    match();
  });
  element("colour").addEventListener("input", colourImages);
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  element("clear").addEventListener("click", () => {
    for (const id of ["query", "true", "predicted"]) element(id).value = "";
    element("show").value = "all";
    match();
    element("query").focus(); // the button is hidden now
  });
  element("more").addEventListener("click", () => {
    const first = state.listed;
    state.listed += PAGE_SIZE;
    fillList();
    element("list").children[first]?.firstChild.focus();
  });
  for (const id of ["list", "neighbours"]) element(id).addEventListener("click", chooseFromButton);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.target.tagName === "SELECT" || state.chosen < 0) return;
    choose(-1);
    if (PLACES !== null) canvas.focus();
  });
}

function listenToMap() {
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", moveFinger);
  canvas.addEventListener("pointerleave", hideHint);
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, lift);
  canvas.addEventListener("keydown", pressKey);
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return; // else the page could not be scrolled past the map
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002)), ...placeOn(event));
  }, { passive: false });
  element("zoom").addEventListener("click", (event) => {
    const factor = event.target.dataset.zoom;
    if (factor !== undefined) Number(factor) ? zoomBy(Number(factor)) : whole();
  });
  element("pictures").hidden = data.thumbnails === null;
  element("pictures").addEventListener("click", () => {
    view.pictures = !view.pictures;
    element("pictures").setAttribute("aria-pressed", String(view.pictures));
    draw();
  });
  dark.addEventListener("change", colourImages);
  new ResizeObserver(fit).observe(element("plane"));
}

function summarise() {
  let [known, wrong] = [0, 0];
  for (let i = 0; i < COUNT; i += 1) [known, wrong] = [known + isKnown(i), wrong + isWrong(i)];
  element("summary").textContent = known
    ? `${format.format(wrong)} of ${format.format(known)} predictions are mistakes (${percent(1 - wrong / known)} correct).`
    : "";
  element("summary").hidden = !known;
}

summarise();
fillControls();
listen();
colourImages();
match();
element("map").hidden = PLACES === null;
element("near").hidden = element("neighbours").hidden = PLACES === null;
if (PLACES !== null) {
  listenToMap();
  fit();
}
document.documentElement.dataset.ready = "true";
