// The page of a job: appends live events to the output, and updates the details while the job waits or runs.
"use strict";

const DETAILS_MS = 5000; // between two updates of the details, which also follow the start and the end of the job
const RETRY_MS = 2000; // after the gateway has closed a stream, for example because it restarts
const MAX_RETRIES = 30;

const details = document.getElementById("details");
const output = document.getElementById("output");
const streamState = document.getElementById("stream-state");
let lastSeq = output ? Number(output.dataset.after) : -1;
let numRetries = 0;
let source = null;
let isLive = Boolean(output && "live" in output.dataset);

function refresh() {
  htmx.trigger(details, "refresh");
}

setInterval(() => {
  if (!document.hidden && details.querySelector("[data-open]")) refresh();
}, DETAILS_MS);

// Returns the element for the text or the reasoning of a completion. All text is inserted as text, never as HTML.
function part(index, name) {
  let completion = output.querySelector(`[data-index="${Number(index)}"]`);
  if (!completion) {
    completion = output.querySelector("[data-index]").cloneNode(true);
    completion.dataset.index = Number(index);
    for (const each of completion.querySelectorAll("pre")) {
      each.textContent = "";
      each.hidden = true;
    }
    output.append(completion);
  }
  return completion.querySelector(name === "token" ? "pre.text" : "pre.reasoning");
}

function show(event) {
  if (event.type === "token" || event.type === "reasoning") {
    const element = part(event.index ?? 0, event.type);
    const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
    element.append(event.text);
    element.hidden = false;
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }
}

function follow() {
  source?.close();
  if (!isLive || document.hidden) return;
  source = new EventSource(`${output.dataset.url}?after=${lastSeq}`);
  source.onopen = () => { streamState.textContent = "live"; };
  source.onmessage = (message) => {
    const event = JSON.parse(message.data);
    if (event.type === "lost") {
      isLive = false;
      source.close();
      streamState.textContent = event.message;
      return;
    }
    if (event.seq <= lastSeq) return;
    lastSeq = event.seq;
    numRetries = 0;
    show(event);
    if (event.type === "started") refresh();
    if (event.is_last) {
      isLive = false;
      source.close();
      streamState.textContent = "finished";
      refresh();
    }
  };
  source.onerror = () => {
    streamState.textContent = "reconnecting …";
    if (source.readyState !== EventSource.CLOSED) return; // the browser reconnects
    if (++numRetries > MAX_RETRIES) streamState.textContent = "disconnected; reload the page";
    else setTimeout(follow, RETRY_MS);
  };
}

// A hidden page closes its stream, and resumes after the last event when it is shown.
document.addEventListener("visibilitychange", () => {
  follow();
  if (!document.hidden && details.querySelector("[data-open]")) refresh();
});

follow();
