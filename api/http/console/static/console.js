// What all pages of the console need: a notice while the gateway does not answer, and questions before a form is sent.
"use strict";

const connection = document.getElementById("connection");

for (const name of ["htmx:error", "htmx:response:error"])
  document.addEventListener(name, () => { connection.hidden = false; });
document.addEventListener("htmx:after:swap", () => { connection.hidden = true; });

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
}, true);

// A table that scrolls must be reachable by keyboard, so that arrow keys scroll it.
for (const container of document.querySelectorAll(".scroll"))
  if (!container.hasAttribute("tabindex")) container.tabIndex = 0;
