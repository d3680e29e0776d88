// Keeps a page up to date: puts in the parts that the server sends, shows log lines, and asks questions.
"use strict";

const view = document.querySelector("main").dataset.view;
const link = document.getElementById("link");
const place = location.search.slice(1);
let newest = 0; // time of the last request for log lines

function put(name, html) {
  const part = document.getElementById(name);
  if (!part) return;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const mark = focused && (focused.getAttribute("href") || focused.getAttribute("aria-label"));
  const scrolled = [...part.querySelectorAll(".scroll")].map((region) => region.scrollLeft);
  const open = [...part.querySelectorAll("details")].map((one) => one.open);
  part.innerHTML = html; // the server has escaped all that comes from a job
  part.querySelectorAll(".scroll").forEach((region, at) => { region.scrollLeft = scrolled[at] || 0; });
  part.querySelectorAll("details").forEach((one, at) => { one.open = open[at] || false; });
  if (mark) {
    const again = [...part.querySelectorAll("[href], [aria-label]")].find(
      (one) => one.getAttribute("href") === mark || one.getAttribute("aria-label") === mark,
    );
    if (again) again.focus({ preventScroll: true });
  }
}

async function fill(target, address, options) {
  try {
    const answer = await fetch(address, options);
    const text = await answer.text();
    const isAtEnd = target.scrollTop + target.clientHeight >= target.scrollHeight - 4;
    if (target.textContent !== text) target.textContent = text;
    if (isAtEnd) target.scrollTop = target.scrollHeight;
  } catch {
    target.textContent = "The server does not answer.";
  }
}

function say(words) {
  if (link.textContent !== words) link.textContent = words;
}

function follow() {
  const source = new EventSource(`events?view=${encodeURIComponent(view)}&${place}`);
  source.onopen = () => say("This page is up to date.");
  source.onmessage = (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) put(name, html);
    document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
    if (Date.now() - newest > 2000) showLines();
  };
  source.onerror = () => {
    say("The connection is lost; this page shows what it saw last, and tries again.");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 5000);
  };
}

function showLines() {
  const filter = document.getElementById("filter");
  if (!filter) return;
  newest = Date.now();
  const job = new URLSearchParams(place).get("job");
  const asked = new URLSearchParams({ job, rank: filter.rank.value.trim(), find: filter.find.value });
  fill(document.getElementById("lines"), `logs?${asked}`);
}

document.addEventListener("input", (event) => { if (event.target.form) showLines(); });
document.addEventListener("submit", (event) => { event.preventDefault(); showLines(); });
document.addEventListener("click", async (event) => {
  const question = event.target.dataset.ask;
  if (!question) return;
  event.target.disabled = true;
  document.getElementById("answer").textContent = "Looking…";
  await fill(document.getElementById("answer"), `${question}?${place}`, { method: "POST" });
  event.target.disabled = false;
});
showLines();
follow();
