// What all pages of the console need: a notice while the gateway does not answer, questions before a form is sent,
// no requests while nobody sees the page, and no transfer of a part that has not changed.
"use strict";

const connection = document.getElementById("connection");

for (const name of ["htmx:error", "htmx:response:error"])
  document.addEventListener(name, () => { connection.hidden = false; });
document.addEventListener("htmx:after:request", (event) => {
  if (event.detail.ctx.response.status < 400) connection.hidden = true;
});

// The events "every" of htmx don't reach their elements while the page is hidden. The page updates when it is shown.
document.addEventListener("every", (event) => {
  if (document.hidden) event.stopImmediatePropagation();
}, true);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden)
    for (const element of document.querySelectorAll('[hx-trigger*="every"]')) htmx.trigger(element, "every");
});

// The gateway answers 304 if a part of the page would show what it showed after the last answer.
const shown = new WeakMap(); // element → URL and ETag of the answer that it shows
document.addEventListener("htmx:before:request", (event) => {
  const { sourceElement, request } = event.detail.ctx;
  const last = shown.get(sourceElement);
  if (last?.url === request.action) request.headers["If-None-Match"] = last.etag;
});
document.addEventListener("htmx:after:swap", (event) => {
  const { sourceElement, request, response } = event.detail.ctx;
  const etag = response?.headers.get("etag");
  if (etag) shown.set(sourceElement, { url: request.action, etag });
  else shown.delete(sourceElement);
});

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
}, true);

// A table that scrolls must be reachable by keyboard, so that arrow keys scroll it.
for (const container of document.querySelectorAll(".scroll"))
  if (!container.hasAttribute("tabindex")) container.tabIndex = 0;
