// The chat page: sends messages, and follows the answer in the journal of its job. Text is only set as `textContent`.
"use strict";

const RETRY_MS = 1000; // pause before the page connects again
const SPEAK_MS = 3000; // between two announcements to screen readers, which read whole sentences
const NEAR_BOTTOM_PX = 120; // closer to the end of the page than this, the page follows the text

const $ = (id) => document.getElementById(id);
const chat = $("chat").dataset;
const chatUrl = `${chat.base}/chat/${chat.chat}`;
const composer = $("composer");
const fields = composer.elements;
const draftKey = `cellama draft ${chat.state === "new" ? "new" : chat.chat}`;
const modelKey = "cellama model";

class RefusedError extends Error {}

// Messages

async function send(retry) {
  const text = fields.text.value;
  if (!retry && !text.trim()) return;
  showProblem("");
  setState("sending");
  try {
    const { turn } = await post("messages", {
      text: retry ? "" : text,
      retry,
      model: fields.model.value,
      num_turns: $("turns").children.length,
      system: fields.system.value,
      temperature: numberOf(fields.temperature),
      max_tokens: numberOf(fields.max_tokens),
    });
    if (retry) $("turns").lastElementChild.remove();
    else fields.text.value = "";
    sessionStorage.removeItem(draftKey);
    localStorage.setItem(modelKey, turn.model);
    addTurn(turn);
    announce(`${turn.model} is answering.`);
    follow();
  } catch (error) {
    showProblem(`${error.message}${retry ? "" : " Your message is still in the field."}`);
    setState("idle");
  }
  fields.text.focus();
}

function numberOf(field) {
  return field.value === "" ? null : Number(field.value);
}

async function post(action, body) {
  let response;
  try {
    response = await fetch(`${chatUrl}/${action}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
  } catch {
    throw new Error("The gateway does not answer. Check that it runs, and send again.");
  }
  if (!response.ok) throw new RefusedError(await messageOf(response));
  return response.status === 204 ? null : response.json();
}

async function messageOf(response) {
  if (response.status === 401) return "Your session has ended. Sign in again in another tab, then send again.";
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered with status ${response.status}. Retry.`;
  }
}

function addTurn(turn) {
  const item = $("turn-template").content.firstElementChild.cloneNode(true);
  $("turns").append(item);
  item.querySelector(".mine").textContent = turn.text;
  showAnswer(item, turn);
  $("empty").hidden = true;
  if (location.pathname !== chatUrl) becomeStored(turn.text);
  item.scrollIntoView({ block: "end" });
}

function becomeStored(text) {
  const title = text.split(/\s+/).join(" ").slice(0, 60);
  history.replaceState(null, "", chatUrl);
  document.title = `${title} · cellama`;
  $("chat-title").textContent = title;
  $("delete").hidden = false;
  const link = document.createElement("a");
  link.href = chatUrl;
  link.dir = "auto";
  link.textContent = title;
  link.setAttribute("aria-current", "page");
  const entry = document.createElement("li");
  entry.append(link);
  $("chats").hidden = false;
  $("chats").querySelector("ol").prepend(entry);
}

function showAnswer(item, turn) {
  item.querySelector(".who").textContent = turn.model;
  item.querySelector(".answer").textContent = turn.answer;
  item.querySelector(".reasoning .message").textContent = turn.reasoning;
  item.querySelector(".reasoning").hidden = !turn.reasoning;
  const note = item.querySelector(".note");
  note.textContent = turn.note;
  note.hidden = !turn.note;
  note.classList.toggle("error", turn.status === "failed");
  item.querySelector(".tokens").textContent = turn.facts;
  item.querySelector(".spent a").href = `${chat.base}/jobs/${turn.job_id}`;
}

// The running answer

async function follow() {
  const item = $("turns").lastElementChild;
  let after = -1;
  setState("running");
  item.setAttribute("aria-busy", "true");
  for (let ended = false; !ended; ) {
    try {
      for await (const event of eventsOf(`${chatUrl}/stream?after=${after}`)) {
        if ("seq" in event) after = event.seq;
        ended = show(item, event);
        if (ended) break;
      }
    } catch (error) {
      if (error instanceof RefusedError) {
        showProblem(error.message);
        break;
      }
    }
    if (!ended) {
      showWait("The connection to the gateway is lost. The page connects again …");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
  item.removeAttribute("aria-busy");
  showWait("");
  setState("idle");
}

// Show an event of the answer. Return whether it was the last one.
function show(item, event) {
  const follows = isNearBottom();
  if (event.type === "token" || event.type === "reasoning") {
    showWait("");
    item.querySelector(event.type === "token" ? ".answer" : ".reasoning .message").append(event.text);
    if (event.type === "reasoning") item.querySelector(".reasoning").hidden = false;
    else hear(event.text);
  } else if (event.type === "wait") {
    showWait(event.text);
  } else if (event.type === "lost") {
    showWait(event.message);
  } else if (event.type === "end") {
    showAnswer(item, event);
    finishHearing(event);
  }
  if (follows) scrollTo({ top: document.body.scrollHeight });
  return event.type === "end";
}

async function* eventsOf(url) {
  const response = await fetch(url, { headers: { accept: "text/event-stream" } });
  if (response.status >= 400 && response.status < 500 && response.status !== 429) {
    throw new RefusedError(await messageOf(response));
  }
  if (!response.ok) throw new Error(await messageOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) if (frame.startsWith("data: ")) yield JSON.parse(frame.slice(6));
  }
}

async function stop() {
  try {
    await post("stop", {});
  } catch (error) {
    showProblem(error.message);
  }
}

// Screen readers hear whole sentences, every few seconds, instead of each token

let unheard = "";
let speaking = null;

function hear(text) {
  unheard += text;
  speaking ??= setTimeout(() => {
    speaking = null;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => unheard.lastIndexOf(mark)));
    if (end >= 0) {
      announce(unheard.slice(0, end + 1));
      unheard = unheard.slice(end + 1);
    }
  }, SPEAK_MS);
}

function finishHearing(turn) {
  clearTimeout(speaking);
  speaking = null;
  announce(`${unheard} ${turn.note} ${turn.status === "done" ? "End of the answer." : ""}`);
  unheard = "";
}

function announce(text) {
  $("spoken").textContent = text;
}

// The state of the page

function setState(state) {
  chat.state = state;
  const isRunning = state === "running";
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = state === "sending";
  $("retry").hidden = state !== "idle" || !$("turns").children.length;
}

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function showWait(text) {
  if ($("wait").textContent === text) return;
  $("wait").textContent = text;
  $("wait").hidden = !text;
  if (text) announce(text);
}

function isNearBottom() {
  return document.body.scrollHeight - scrollY - innerHeight < NEAR_BOTTOM_PX;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.state === "new" || chat.state === "idle") send(false);
});
fields.text.addEventListener("input", () => sessionStorage.setItem(draftKey, fields.text.value));
fields.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.state === "running") stop();
});
$("stop").addEventListener("click", stop);
$("retry").addEventListener("click", () => send(true));
$("delete").addEventListener("submit", (event) => {
  if (!confirm("Delete this chat? Its answer stops, and its text can't be restored.")) event.preventDefault();
});

fields.text.value = sessionStorage.getItem(draftKey) ?? "";
if (chat.state === "new") {
  const used = localStorage.getItem(modelKey);
  if ([...fields.model.options].some((option) => option.value === used)) fields.model.value = used;
} else {
  scrollTo({ top: document.body.scrollHeight });
}
if (chat.state === "running") follow();
else setState(chat.state);
if (matchMedia("(min-width: 60em)").matches) fields.text.focus();
else $("chats").open = false;
