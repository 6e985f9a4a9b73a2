// The answers of the report: search, order, language. Text of rows is only ever set as textContent.
"use strict";
const rows = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const list = document.getElementById("answers");
const card = document.getElementById("answer");
const search = document.getElementById("search");
const order = document.getElementById("order");
const more = document.getElementById("more");
const PAGE = 50;
let shown = PAGE;

const gain = (row, name, sign) => sign * ((row["adapter_" + name] ?? 0) - (row["base_" + name] ?? 0));
const ORDERS = {
  gained: (a, b) => gain(b, "chrf", 1) - gain(a, "chrf", 1),
  lost: (a, b) => gain(a, "chrf", 1) - gain(b, "chrf", 1),
  loss_gained: (a, b) => gain(b, "loss", -1) - gain(a, "loss", -1),
  loss_lost: (a, b) => gain(a, "loss", -1) - gain(b, "loss", -1),
  in_order: () => 0,
};

function fill(row) {
  const node = card.content.cloneNode(true);
  const put = (place, text) => { node.querySelector(place).textContent = text ?? ""; };
  const byLoss = order.value.startsWith("loss") || row.base === null;
  const name = byLoss ? "loss" : "chrf";
  const digits = byLoss ? 3 : 1;
  const change = (row["adapter_" + name] - row["base_" + name]).toFixed(digits);
  put(".question", row.question);
  put(".id", row.id);
  put(".gain", (byLoss ? "loss " : "chrF ") + (change > 0 ? "+" : "") + change.replace("-", "−"));
  node.querySelector(".gain").classList.add(...(Number(change) ? [(change > 0) === byLoss ? "worse" : "better"] : []));
  put(".reference .text", row.reference);
  for (const side of ["base", "adapter"]) {
    const chrf = row[side + "_chrf"];
    const scores = (chrf == null ? "" : "· chrF " + chrf.toFixed(1) + " ") + "· loss " + row[side + "_loss"].toFixed(3);
    put("." + side + " .score", scores + (row[side + "_stopped"] === false ? " · ✂" : ""));
    put("." + side + " .text", row[side] === "" ? "∅" : row[side]);
    if (row[side] === null) node.querySelector("." + side + " .text").remove();
  }
  return node;
}

function draw() {
  const wanted = search.value.trim().toLowerCase();
  const texts = (row) => [row.id, row.question, row.reference, row.base, row.adapter].join("\n").toLowerCase();
  const found = rows.filter((row) => !wanted || texts(row).includes(wanted)).sort(ORDERS[order.value]);
  list.replaceChildren(...found.slice(0, shown).map(fill));
  more.hidden = found.length <= shown;
  document.getElementById("count").textContent = Math.min(shown, found.length) + " / " + rows.length;
}

function speak(language) {
  root.lang = root.dataset.language = language;
  const key = language === "en" ? "en" : "zh";
  for (const option of order.options) option.textContent = option.dataset[key];
  search.placeholder = search.dataset[key];
}

search.addEventListener("input", () => { shown = PAGE; draw(); });
order.addEventListener("change", () => { shown = PAGE; draw(); });
more.addEventListener("click", () => { shown += PAGE; draw(); });
document.getElementById("language").addEventListener("click", () => speak(root.lang === "en" ? "zh-CN" : "en"));
speak((navigator.language || "en").toLowerCase().startsWith("zh") ? "zh-CN" : "en");
draw();
