"use strict";
// What hosts wrote is put into the page as text, never as markup.

const figure = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString("en");
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const known = (gpus, name) => gpus.map((gpu) => gpu[name]).filter((value) => value !== null);
const gigabytes = (bytes) => (bytes === null ? "–" : `${(bytes / 2 ** 30).toFixed(1)} GiB`);
const clock = (seconds) =>
  `${Math.floor(seconds / 3600)}:${String(Math.floor(seconds / 60) % 60).padStart(2, "0")}:${String(Math.floor(seconds) % 60).padStart(2, "0")}`;

function cells(host) {
  const gpus = host.gpus;
  const most = (name) => { const values = known(gpus, name); return values.length ? Math.max(...values) : null; };
  const watts = known(gpus, "watts");
  return [
    figure(host.step, 9), figure(host.samples_per_s, 4), figure(host.loss), percent(host.wait_share), percent(host.sync_share),
    gpus.length ? percent(mean(known(gpus, "utilisation")) / 100) : "–", gigabytes(most("memory_bytes")), figure(most("celsius")),
    figure(watts.length ? watts.reduce((sum, value) => sum + value, 0) : null),
  ];
}

function row(words) {
  const made = document.createElement("tr");
  words.forEach((word, place) => {
    const cell = document.createElement("td");
    cell.textContent = word;
    if (place) cell.className = "n";
    made.append(cell);
  });
  return made;
}

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
      line.querySelector(".parts").textContent = job.hosts.map((host) => `${host.node} ${figure(host.samples_per_s, 4)}`).join(", ");
    }
  });
}

const live = document.getElementById("live");
if (live) {
  follow(live, (found) => {
    const job = found.find((one) => one.job === live.dataset.job);
    if (!job) return again();
    document.getElementById("state").textContent = job.state;
    if (job.step !== null) {
      const left = job.left_s === null ? "" : `, about ${clock(job.left_s)} left`;
      document.getElementById("now").textContent =
        `step ${job.step}${job.steps ? `/${job.steps}` : ""}, ${figure(job.samples_per_s, 4)} samples/s, loss ${figure(job.loss)}, running ${clock(job.elapsed_s)}${left}`;
    }
    document.getElementById("parts").replaceChildren(
      ...job.hosts.map((host) => row([host.silent ? `${host.node}: no answer` : host.node, ...cells(host)])));
    document.getElementById("remark").textContent = job.slowest ? `${job.slowest} is the slowest: others wait for it.` : "";
  });
}

const log = document.getElementById("log");
const MOST = 200000;
if (log) {
  (async () => {
    const answer = await fetch(log.dataset.log);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
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
