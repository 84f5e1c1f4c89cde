// The page of a served network: asks it, shows its tasks and what they share, teaches it new ones.
"use strict";

const FEW = 24; // cards shown at first
const DRAWN = 40; // tasks drawn
const LEAST = 0.02; // share that gets an arc
const byId = (id) => document.getElementById(id);
const state = { tasks: [], count: -1, all: false, fresh: new Set(), learning: false };

// Elements: make("li", { class: "name" }, child, "text", …)
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return filled(element, attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`;
const plural = (count, word, several = `${word}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? word : several}`;
const colour = (index) => index % 8;

// Asking the server. An error carries the sentence that the server gave.
async function fetched(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer.");
  }
  const data = await response.json().catch(() => ({}));
  if (response.status === 401) {
    byId("locked").hidden = false;
    if (token) byId("token-error").textContent = "That is not the token.";
    sessionStorage.removeItem("token");
  }
  if (!response.ok) throw new Error(sentence(data.error || `The server answered ${response.status}`));
  return data;
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function showError(id, error) {
  byId(id).textContent = error ? error.message : "";
}

// Tasks: the choice, the cards, the drawing.
async function loadTasks() {
  const data = await fetched("/tasks");
  const known = new Set(state.tasks.map((task) => task.name));
  if (known.size) for (const { name } of data.tasks) if (!known.has(name)) state.fresh.add(name);
  state.tasks = data.tasks;
  state.guesses = data.network.guesses;
  state.count = data.tasks.length;
  const { numbers, bytes } = data.network;
  byId("network").textContent =
    `${plural(state.count, "task")}, ${plural(numbers, "number")} (${size(bytes)})`;
  showChoice();
  showCards();
  state.sharing = await fetched("/sharing");
  redraw();
}

function size(bytes) {
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(bytes < 1e4 ? 1 : 0)} kB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

function showChoice() {
  const select = byId("task");
  const [chosen, all] = [select.value, select.selectedOptions[0]?.dataset.all];
  const options = state.tasks.map((task) => make("option", { value: task.name }, task.title));
  if (state.tasks.length !== 1) options.unshift(make("option", { value: "", "data-all": "yes" }, "All tasks"));
  if (state.guesses) options.unshift(make("option", { value: "" }, "Guess the task"));
  select.replaceChildren(...options);
  if (all) select.selectedIndex = options.findIndex((option) => option.dataset.all);
  if (state.tasks.some((task) => task.name === chosen)) select.value = chosen;
  showInputs();
}

const kindOf = (task) => (task.inputs ? task.inputs.kind : "tensor");
const chosenTasks = () => {
  const name = byId("task").value;
  return name ? state.tasks.filter((task) => task.name === name) : state.tasks;
};

function chosenKind() {
  const kinds = [...new Set(chosenTasks().map(kindOf))];
  const radio = document.querySelector("#kinds input:checked");
  return radio && kinds.includes(radio.value) ? radio.value : kinds[0];
}

function showInputs() {
  const kinds = [...new Set(chosenTasks().map(kindOf))];
  const words = { image: "Images", text: "Text", tensor: "Numbers" };
  const before = chosenKind();
  const fieldset = byId("kinds");
  fieldset.hidden = kinds.length < 2;
  fieldset.replaceChildren(
    make("legend", { class: "hidden" }, "Kind of input"),
    ...kinds.map((kind) => {
      const radio = make("input", { type: "radio", name: "kind", value: kind });
      radio.checked = kind === before;
      return make("label", {}, radio, words[kind]);
    }),
  );
  showKind();
}

function showKind() {
  const kind = chosenKind();
  for (const each of ["image", "text", "tensor"]) byId(`${each}-input`).hidden = each !== kind;
  const task = chosenTasks().find((each) => kindOf(each) === kind);
  const shape = task && task.inputs && task.inputs.shape;
  byId("tensor-hint").textContent = shape
    ? `Nested lists of ${shape.join(" × ")} numbers in JSON, such as [0.1, 0.2, …]`
    : "Nested lists of numbers in JSON";
}

function showCards() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const matches = state.tasks
    .map((task, index) => [task, index])
    .filter(([task]) => !wanted || searched(task).includes(wanted))
    .reverse();
  byId("filter").hidden = state.tasks.length < 7;
  const shown = state.all ? matches : matches.slice(0, FEW);
  byId("cards").replaceChildren(...shown.map(([task, index]) => card(task, index)));
  byId("more").hidden = shown.length === matches.length;
  byId("more").textContent = `Show all ${matches.length.toLocaleString("en")}`;
  if (!state.tasks.length) {
    byId("cards").replaceChildren(make("li", { class: "card" }, make("p", {}, "No task yet.")));
  }
}

const searched = (task) =>
  [task.title, task.name, ...task.classes, ...task.tags].join("\n").toLowerCase();

function card(task, index) {
  const top = make("div", { class: "top" });
  top.append(make("span", { class: `dot b${colour(index)}` }), make("h3", {}, task.title));
  if (task.accuracy !== null) {
    const words = make("span", { class: "hidden" }, "Accuracy on held-out data: ");
    top.append(make("span", { class: "accuracy" }, words, percent(task.accuracy)));
  }
  const chips = make("ul", { class: "chips", "aria-label": "Classes" });
  for (const name of task.classes.slice(0, 8)) chips.append(make("li", {}, name));
  if (task.classes.length > 8) chips.append(make("li", {}, `and ${task.classes.length - 8} more`));
  const facts = [plural(task.classes.length, "class", "classes"), plural(task.numbers, "number")];
  if (task.samples) facts.push(plural(task.samples, "sample"));
  const item = make("li", { class: state.fresh.has(task.name) ? "card new" : "card" }, top);
  if (task.description) item.append(make("p", {}, task.description));
  item.append(chips, make("p", {}, facts.join(" · ")));
  if (task.inputs) item.append(make("p", {}, `Takes ${task.inputs.text}`));
  item.append(make("p", {}, task.uses.length ? `Selects from ${listed(task.uses)}` : "Selects from no other task"));
  if (task.tags.length) {
    const tags = task.tags.map((tag) => make("li", { class: "tag" }, tag));
    item.append(make("ul", { class: "chips", "aria-label": "Tags" }, ...tags));
  }
  return item;
}

function listed(names) {
  const shown = names.slice(-4).reverse().map(titleOf);
  return names.length > 4 ? `${shown.join(", ")} and ${names.length - 4} more` : shown.join(", ");
}

const titleOf = (name) => (state.tasks.find((task) => task.name === name) || { title: name }).title;

function redraw() {
  if (state.sharing) draw(state.sharing.tasks, state.sharing.shares);
}

// The drawing: a row for each task, arcs from the tasks whose factors it selects, and a bar of where
// its weights come from. `shares[t]` has seeded factors first, then each task's up to its own.
function draw(names, shares) {
  const home = byId("drawing");
  byId("sharing").hidden = names.length < 2;
  if (names.length < 2) return;
  const first = Math.max(0, names.length - DRAWN);
  const shown = names.slice(first);
  const width = Math.max(280, Math.min(940, home.clientWidth)); // in pixels, so that letters keep their size
  const [row, label, arcs] = width < 500 ? [30, 118, 70] : [30, 160, 140];
  const height = shown.length * row + 30;
  const y = (task) => (task - first) * row + row / 2 + 24;
  const svg = drawn("svg", { width, height, role: "img", "aria-labelledby": "drawing-title" });
  svg.append(drawn("title", { id: "drawing-title" }, `Shares of factors between ${plural(shown.length, "task")}`));
  const left = label + arcs;
  svg.append(drawn("text", { class: "faint", x: width, y: 12, "font-size": 12.5, "text-anchor": "end" }, "where its weights come from"));
  const bars = drawn("g");
  shares.slice(first).forEach((parts, at) => {
    const task = first + at;
    for (const [index, share] of parts.entries()) {
      const source = index - 1; // the first are seeded
      if (source < first || source === task || share < LEAST) continue;
      const bow = Math.min(1.3 * arcs - 20, 14 + (task - source) * (arcs / 9));
      const [from, to] = [y(source), y(task)];
      const path = `M${label} ${from} C${label + bow} ${from} ${label + bow} ${to} ${label} ${to}`;
      const line = drawn("path", { d: path, class: `l${colour(source)}`, "stroke-width": 1 + 9 * share });
      line.dataset.of = `${source} ${task}`;
      svg.append(line);
    }
    const group = drawn("g", { class: "bars" });
    group.dataset.task = task;
    let x = left;
    for (const [index, share] of parts.entries()) {
      const length = share * (width - left);
      if (length < 0.4) continue;
      const name = index === 0 ? "seeded" : `s${colour(index - 1)}`;
      const whose = index === 0 ? "seeded factors" : index - 1 === task ? "its own" : titleOf(names[index - 1]);
      const part = drawn("rect", { class: `part ${name}`, x, y: y(task) - 8, width: Math.max(0.4, length - 1), height: 16, rx: 2 });
      part.append(drawn("title", {}, `${whose}: ${percent(share)}`));
      group.append(part);
      x += length;
    }
    group.append(drawn("circle", { class: `s${colour(task)}`, cx: label, cy: y(task), r: 5 }));
    const title = titleOf(names[task]);
    const most = width < 500 ? 13 : 17;
    const short = title.length > most ? `${title.slice(0, most - 1)}…` : title;
    group.append(drawn("text", { x: label - 14, y: y(task) + 4, "text-anchor": "end" }, short));
    group.append(drawn("rect", { class: "hit", x: 0, y: y(task) - row / 2, width: label + 8, height: row }));
    group.addEventListener("mouseenter", () => highlight(svg, task));
    group.addEventListener("mouseleave", () => highlight(svg, null));
    bars.append(group);
  });
  svg.append(bars);
  const note = first ? [make("p", { class: "hint" }, `The last ${DRAWN} of ${names.length} tasks.`)] : [];
  home.replaceChildren(...note, svg);
  showTable(names, shares, first);
}

function highlight(svg, task) {
  svg.classList.toggle("dim", task !== null);
  for (const line of svg.querySelectorAll("path")) {
    line.classList.toggle("on", line.dataset.of.split(" ").includes(String(task)));
  }
  for (const group of svg.querySelectorAll(".bars")) {
    group.classList.toggle("on", group.dataset.task === String(task));
  }
}

function showTable(names, shares, first) {
  const heads = ["Task", "Seeded", ...names.slice(first).map(titleOf)];
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const rows = shares.slice(first).map((parts, at) => {
    const kept = [parts[0], ...parts.slice(first + 1)];
    const cells = heads.slice(1).map((_, index) => make("td", {}, index < kept.length ? percent(kept[index]) : ""));
    return make("tr", {}, make("th", { scope: "row" }, titleOf(names[first + at])), ...cells);
  });
  const table = make("table", {}, make("caption", { class: "hidden" }, "Where each task's weights come from"));
  table.append(make("thead", {}, head), make("tbody", {}, ...rows));
  const home = byId("sharing-table");
  home.hidden = false;
  home.querySelector(".scroll").replaceChildren(table);
}

// Asking.
async function ask(send, describe) {
  showError("ask-error", null);
  byId("ask-status").textContent = "Asking …";
  try {
    const { answers } = await send();
    describe(answers);
    byId("ask-status").textContent = `${plural(answers.length, "answer")}.`;
  } catch (error) {
    byId("ask-status").textContent = "";
    showError("ask-error", error);
  }
}

// As many as a request takes: only tasks of this kind, and those all at once if they are all.
// None for a network that is to guess.
function askedTasks(kind) {
  const choice = byId("task").selectedOptions[0];
  if (state.guesses && choice && !choice.value && !choice.dataset.all) return [];
  return chosenTasks().filter((task) => kindOf(task) === kind).map((task) => task.name);
}

function askImages(files) {
  const images = [...files];
  if (!images.length) return;
  const form = new FormData();
  for (const name of askedTasks("image")) form.append("tasks", name);
  for (const image of images) form.append("image", image, image.name);
  ask(
    () => fetched("/predict", { method: "POST", body: form }),
    (answers) => show(images.map((image, item) => shown(picture(image), image.name, ofItem(answers, item)))),
  );
}

function askJson(kind, content, label) {
  const tasks = askedTasks(kind);
  const body = JSON.stringify({ [kind]: content, ...(tasks.length && { tasks }) });
  const headers = { "Content-Type": "application/json" };
  ask(
    () => fetched("/predict", { method: "POST", body, headers }),
    (answers) => show([shown(null, label, answers)]),
  );
}

function askTyped(event) {
  event.preventDefault();
  const kind = chosenKind();
  if (kind === "text") {
    const text = byId("text").value;
    askJson("text", text, text.length > 120 ? `${text.slice(0, 119)}…` : text);
  } else if (kind === "tensor") {
    try {
      askJson("tensor", JSON.parse(byId("tensor").value), "");
    } catch {
      showError("ask-error", new Error("Numbers are nested lists in JSON, such as [0.1, 0.2]."));
    }
  }
}

const ofItem = (answers, item) => answers.filter((answer) => answer.item === item);

function picture(file) {
  const image = make("img", { alt: "" });
  image.addEventListener("load", () => {
    if (image.naturalWidth < 64) image.classList.add("tiny");
    URL.revokeObjectURL(image.src);
  });
  image.src = URL.createObjectURL(file);
  return image;
}

function shown(image, what, answers) {
  const blocks = answers.map((answer) => {
    const list = make("ol", { class: "classes" }, ...answer.classes.map(classRow));
    const sure = answer.guessed ? [make("p", { class: "hint" }, guessOf(answer.guessed))] : [];
    return make("div", {}, make("h3", {}, titleOf(answer.task)), ...sure, list);
  });
  const body = make("div", {});
  if (what) body.append(make("p", { class: "what" }, what));
  body.append(make("div", { class: "of-tasks" }, ...blocks));
  return make("article", { class: image ? "answer" : "answer plain" }, ...(image ? [image] : []), body);
}

const guessOf = ({ probability, none }) =>
  none > 0.95 ? "The likeliest task, but it may be of none." : `Guessed, ${percent(probability)} sure.`;

function classRow({ name, probability }) {
  const fill = make("span");
  fill.style.width = `${100 * probability}%`;
  const bar = make("div", { class: "bar", "aria-hidden": "true" }, fill);
  const share = make("span", { class: "share" }, percent(probability));
  return make("li", {}, make("span", { class: "name" }, name), share, bar);
}

function show(articles) {
  byId("answers").replaceChildren(...articles);
}

// Teaching.
async function teach(event) {
  event.preventDefault();
  const form = new FormData();
  form.append("name", byId("name").value.trim());
  form.append("epochs", byId("epochs").value);
  form.append("zip", byId("zip").files[0]);
  const button = event.target.querySelector("button");
  button.disabled = true;
  showError("teach-error", null);
  try {
    await fetched("/learn", { method: "POST", body: form });
    event.target.reset();
    await loadLearning();
  } catch (error) {
    showError("teach-error", error);
  }
  button.disabled = false;
}

async function loadLearning() {
  const { allowed, tasks = [] } = await fetched("/learn");
  byId("teach").hidden = byId("to-teach").hidden = !allowed;
  state.learning = tasks.some((task) => !["done", "failed"].includes(task.stage));
  byId("learning").replaceChildren(...tasks.map(lesson));
}

function lesson(task) {
  const item = make("article", { class: "lesson", "aria-label": `Learning ${task.name}` });
  item.append(make("h3", {}, task.name));
  if (task.stage === "failed") {
    item.append(make("p", { class: "failed" }, sentence(task.error)));
    return item;
  }
  const words = {
    unpacking: "Unpacking the images",
    reading: `Reading ${plural(task.images || 0, "image")}`,
    learning: `Epoch ${task.epoch} of ${task.epochs}`,
    saving: "Saving",
    done: `Learned: ${percent(task.accuracy || 0)} right on held-out images`,
  };
  item.append(make("p", {}, words[task.stage] || task.stage));
  if (task.stage !== "done") {
    const bar = make("progress", { "aria-label": `Progress of ${task.name}`, max: task.epochs || 1 });
    if (task.epochs) bar.value = task.epoch;
    item.append(bar);
  }
  if (task.losses.length > 1) item.append(curve(task.losses));
  return item;
}

function curve(losses) {
  const most = Math.max(...losses);
  const points = losses.map((loss, index) => {
    const x = (300 * index) / (losses.length - 1);
    return `${x.toFixed(1)},${(96 - (92 * loss) / (most || 1)).toFixed(1)}`;
  });
  const last = losses[losses.length - 1];
  const words = `Loss from ${losses[0].toFixed(3)} to ${last.toFixed(3)}`;
  const svg = drawn("svg", { class: "curve", viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": words });
  svg.append(drawn("line", { x1: 0, x2: 300, y1: 98, y2: 98 }), drawn("polyline", { points: points.join(" ") }));
  return make("div", {}, svg, make("p", {}, words));
}

// Tasks that others add appear by themselves.
async function watch() {
  if (!document.hidden) {
    try {
      const { tasks } = await fetched("/health");
      if (tasks !== state.count && state.count >= 0) await loadTasks();
      if (state.learning) await loadLearning();
    } catch {
      // The next look may find it again.
    }
  }
  setTimeout(watch, state.learning ? 500 : 2000);
}

async function start() {
  try {
    await loadTasks();
    await loadLearning();
    byId("locked").hidden = true;
  } catch (error) {
    if (byId("locked").hidden) showError("ask-error", error);
  }
}

function listen() {
  byId("task").addEventListener("change", showInputs);
  byId("kinds").addEventListener("change", showKind);
  byId("ask-form").addEventListener("submit", askTyped);
  byId("teach-form").addEventListener("submit", teach);
  byId("filter").addEventListener("input", showCards);
  byId("more").addEventListener("click", () => {
    state.all = true;
    showCards();
  });
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", byId("token").value);
    byId("token-error").textContent = "";
    start();
  });
  addEventListener("resize", redraw);
  const files = byId("files");
  files.addEventListener("change", () => {
    askImages(files.files);
    files.value = ""; // so that the same file can be chosen again
  });
  const drop = byId("image-input");
  for (const name of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") askImages(event.dataTransfer.files);
    });
  }
}

listen();
start().then(watch);
