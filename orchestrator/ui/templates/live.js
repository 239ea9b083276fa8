"use strict";
// What hosts wrote is put into the page as text, or by the server's templates, which escape it.

const figure = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString("en");

let leaves = false; // a form was sent: its answer is the next page

function again() {
  if (!leaves) location.reload();
}

function follow(place, show) {
  const source = new EventSource(place.dataset.events);
  source.onmessage = (event) => show(JSON.parse(event.data));
}

const hosts = document.getElementById("hosts");
if (hosts) {
  const looked = document.getElementById("looked");
  looked.textContent = "status as last known; asking the hosts …";
  (async () => {
    const answer = await fetch(hosts.dataset.status).catch(() => ({ ok: false })); // whoever served this page has ended
    const found = answer.ok ? await answer.json() : {};
    for (const line of hosts.querySelectorAll("tr[data-node]")) {
      const status = found[line.dataset.node];
      const shown = line.querySelector(".state");
      if (!status) continue;
      shown.className = `state ${status.replaceAll(" ", "-")}`;
      shown.textContent = status;
    }
    looked.textContent = answer.ok ? `status at ${new Date().toLocaleTimeString()}` : "status as last known";
  })();
}

const jobs = document.getElementById("jobs");
if (jobs && jobs.querySelector('[data-state="running"], [data-state="starting"]')) {
  follow(jobs, (found) => {
    const byId = new Map(found.map((job) => [job.job, job]));
    for (const line of jobs.querySelectorAll("tr[data-job]")) {
      const job = byId.get(line.dataset.job);
      const state = line.querySelector(".state");
      if (!job) {
        if (["running", "starting"].includes(line.dataset.state)) again();
        continue;
      }
      state.textContent = job.state;
      line.querySelector(".speed").textContent = figure(job.samples_per_s, 4);
      line.querySelector(".result").textContent = job.loss === null ? "" : `loss ${figure(job.loss)}`;
      line.querySelector(".slow").textContent = job.slow_words;
    }
  });
}

const FIGURES_MS = 3000;
const figures = document.getElementById("figures");
if (figures && figures.dataset.figures) {
  follow(figures, (found) => {
    const job = found.find((one) => one.job === figures.dataset.job);
    if (!job) return again();
    document.getElementById("state").textContent = job.state;
  });
  const renew = async () => {
    const answer = await fetch(figures.dataset.figures).catch(() => ({ ok: false }));
    // Our own page, in which what hosts wrote is escaped, and whose policy allows no script in it.
    if (answer.ok && !figures.querySelector(":hover.hover")) figures.innerHTML = await answer.text();
    setTimeout(renew, FIGURES_MS);
  };
  renew();
}

const log = document.getElementById("log");
const MOST = 200000;
if (log) {
  (async () => {
    const answer = await fetch(log.dataset.log);
    let isFirst = true; // "loading …" stands there until the first line, or the end
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (isFirst) log.textContent = done ? "it printed nothing" : "";
      isFirst = false;
      if (done) break;
      const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
      log.append(value);
      if (log.textContent.length > MOST) log.textContent = log.textContent.slice(-MOST / 2);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  })();
}

document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (button && button.dataset.ask && !confirm(button.dataset.ask)) return event.preventDefault();
  leaves = true;
  const busy = (button && button.dataset.busy) || event.target.dataset.busy;
  if (button && busy) setTimeout(() => { button.disabled = true; button.textContent = busy; });
});
