
"use strict";
// Data is inserted into the page only as text: textContent, option texts and input values.

const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

function compare(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
}

function keyOf(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  return cell.textContent === "\u2013" ? null : cell.textContent;
}

// Missing cells come last in both directions; a third click restores the original order.
function sortBy(heading) {
  const body = heading.closest("table").tBodies[0];
  const order = NEXT[heading.getAttribute("aria-sort")];
  for (const other of heading.parentElement.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", order);
  const rows = [...body.rows].sort((a, b) => a.place - b.place);
  if (order !== "none") {
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [a, b].map((row) => keyOf(row.cells[heading.cellIndex]));
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * compare(x, y);
    });
  }
  body.append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  [...table.tBodies[0].rows].forEach((row, place) => { row.place = place; });
  for (const heading of table.tHead.rows[0].cells) {
    heading.firstElementChild.addEventListener("click", () => sortBy(heading));
  }
}

function made(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function number(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}

// Element with the given text, in which all matches of the search are marked.
function marked(tag, text, needle, name) {
  const element = made(tag, undefined, name);
  const lower = text.toLowerCase();
  let from = 0;
  if (needle && lower.length === text.length) {
    for (let at; (at = lower.indexOf(needle, from)) >= 0; from = at + needle.length) {
      element.append(text.slice(from, at), made("mark", text.slice(at, at + needle.length)));
    }
  }
  element.append(text.slice(from));
  return element;
}

function showCompletions(held) {
  const SHOWN = 20, FEW = 100;
  const id = (name) => document.getElementById(name);
  const rows = held.rows.map((values) => {
    const row = Object.fromEntries(held.keys.map((key, i) => [key, values[i]]));
    row.prompt = held.prompts[row.prompt];
    return row;
  });
  const texts = ["prompt", "completion", "answer", "extracted", "prompt_id", "run"];
  const haystacks = rows.map((row) => texts.map((key) => row[key] ?? "").join("\n").toLowerCase());
  const form = id("filters"), search = id("search"), order = id("order");
  const filters = ["reward", "step", "run"].filter((key) => held.keys.includes(key)).map(filterOf);
  let found = rows, page = 0;

  // A selection list for few values, otherwise inputs for the smallest and largest value.
  function filterOf(key) {
    const values = [...new Set(rows.map((row) => row[key]))].sort((a, b) => compare(a ?? "", b ?? ""));
    if (values.length <= FEW) {
      const select = made("select");
      select.append(new Option(`all (${values.length})`, ""));
      values.forEach((value, i) => select.append(new Option(number(value ?? "none"), String(i))));
      add(key, select);
      return (row) => select.value === "" || row[key] === values[Number(select.value)];
    }
    const [low, high] = ["from", "to"].map((end) => {
      const input = made("input");
      input.type = "number";
      input.step = "any";
      add(`${key} ${end}`, input);
      return input;
    });
    return (row) => (low.value === "" || row[key] >= Number(low.value))
      && (high.value === "" || row[key] <= Number(high.value));
  }

  function add(text, control) {
    const label = made("label", text);
    label.append(control);
    form.insertBefore(label, order.parentElement);
  }

  function choose() {
    const needle = search.value.toLowerCase();
    found = rows.filter((row, i) => haystacks[i].includes(needle) && filters.every((is) => is(row)));
    const key = order.value.replace("-", ""), sign = order.value.startsWith("-") ? -1 : 1;
    const of = (row) => (key === "reward" ? row.reward : row.length ?? row.completion.length);
    if (key) found.sort((a, b) => sign * compare(of(a) ?? "", of(b) ?? ""));
    page = 0;
    show();
  }

  function show() {
    const pages = Math.max(1, Math.ceil(found.length / SHOWN));
    const rewards = found.map((row) => row.reward).filter((value) => typeof value === "number");
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    id("count").textContent = `${found.length} of ${rows.length} completions`
      + (rewards.length ? `, mean reward ${number(mean)}` : "");
    id("place").textContent = `page ${page + 1} of ${pages}`;
    id("pager").hidden = pages === 1;
    id("back").disabled = page === 0;
    id("forth").disabled = page === pages - 1;
    const needle = search.value.toLowerCase();
    const shown = found.slice(page * SHOWN, (page + 1) * SHOWN);
    id("list").replaceChildren(...shown.map((row) => card(row, needle)));
  }

  function card(row, needle) {
    const article = made("article", undefined, row.reward > 0 ? "rewarded" : "");
    const said = made("p", undefined, "said");
    said.append(made("b", `reward ${number(row.reward ?? "none")}`));
    for (const key of held.keys) {
      if (["prompt", "completion", "reward", "answer", "extracted"].includes(key)) continue;
      const value = row[key];
      const text = typeof value === "boolean" ? (value ? key : `not ${key}`) : `${key} ${number(value ?? "none")}`;
      said.append(made("span", text.replaceAll("_", " ")));
    }
    if ("answer" in row) said.append(marked("span", `expected ${row.answer}`, needle));
    if ("extracted" in row) said.append(marked("span", row.extracted === null ? "no answer found" : `found ${row.extracted}`, needle));
    article.append(said, marked("pre", row.prompt, needle, "prompt"), marked("pre", row.completion, needle));
    return article;
  }

  function turn(by) {
    page += by;
    show();
    id("completions").scrollIntoView();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", choose);
  id("back").addEventListener("click", () => turn(-1));
  id("forth").addEventListener("click", () => turn(1));
  form.hidden = false;
  show();
}

const block = document.getElementById("completions-data");
if (block) showCompletions(JSON.parse(block.textContent));
