// The keys page: copies a new key, and moves the focus to what the last form has changed.
"use strict";

document.querySelector("[data-focus]")?.focus();

const secret = document.getElementById("secret");
if (secret) {
  // Loading this page again must not create another key.
  history.replaceState(null, "", location.pathname);
  secret.addEventListener("focus", () => secret.select());
  document.getElementById("copy").addEventListener("click", async () => {
    const copied = document.getElementById("copied");
    try {
      await navigator.clipboard.writeText(secret.value);
      copied.textContent = "Copied.";
    } catch {
      secret.focus();
      copied.textContent = "Press Ctrl+C to copy the selected key.";
    }
  });
}
