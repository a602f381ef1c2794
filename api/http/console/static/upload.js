// The upload of a bulk run, with progress and a way to stop it. Without this script the form is sent as it is.
"use strict";

const form = document.getElementById("upload");
const part = (id) => document.getElementById(id);
let request = null;

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (request) return;
  const file = form.elements.file.files[0];
  const maxBytes = Number(form.dataset.maxBytes);
  if (file.size > maxBytes) {
    showProblem(`The file has ${file.size} bytes, and the limit is ${maxBytes}. Split it into several files.`);
    return;
  }
  showProblem("");
  setUploading(true);
  request = new XMLHttpRequest();
  request.upload.addEventListener("progress", ({ loaded, total }) => showProgress(loaded, total));
  request.addEventListener("load", ended);
  request.addEventListener("error", () => failed("The connection to the gateway is lost. Upload the file again."));
  request.addEventListener("abort", () => failed("The upload was cancelled."));
  request.open("POST", form.action);
  request.setRequestHeader("x-console-upload", "1");
  request.setRequestHeader("accept", "application/json");
  request.send(new FormData(form));
});
form.elements.file.addEventListener("change", showFields);
showFields();
part("abort").addEventListener("click", () => request?.abort());

// Show only the fields that the chosen file needs.
function showFields() {
  const name = form.elements.file.files[0]?.name ?? "";
  const isTable = /\.(csv|tsv|txt)$/i.test(name);
  part("table").hidden = !isTable;
  part("jsonl").hidden = isTable;
}

function showProgress(loaded, total) {
  const percent = Math.floor((100 * loaded) / total);
  part("uploaded").value = percent;
  if (percent === 100) part("upload-state").textContent = "Uploaded. The run is being created …";
}

// The gateway answers with the run, or with an error.
function ended() {
  let answer = null;
  try {
    answer = JSON.parse(request.responseText);
  } catch {
    // A proxy has answered.
  }
  if (request.status === 201 && answer) location.assign(answer.url);
  else failed(answer?.error?.message ?? `The upload failed with status ${request.status}. Upload the file again.`);
}

function failed(problem) {
  request = null;
  setUploading(false);
  showProblem(problem);
}

function setUploading(isUploading) {
  part("start").disabled = isUploading;
  part("abort").hidden = part("uploaded").hidden = !isUploading;
  part("upload-state").textContent = isUploading ? "Uploading …" : "";
  part("uploaded").value = 0;
}

function showProblem(text) {
  part("problem").textContent = text;
  part("problem").hidden = !text;
}
