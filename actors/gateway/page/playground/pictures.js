/* ---- pictures: dropped, pasted or picked, sent with the next turn ---- */
let attached = [];
function attach(files) {
  if ($("attach").hidden) { hint("This model takes text alone."); return; }
  for (const file of files) {
    if (!/^(image|video)\//.test(file.type)) continue;
    const reader = new FileReader();
    reader.onload = () => {
      const shown = file.type.startsWith("video/"), one = { url: reader.result, video: shown || file.type === "image/gif" };
      const drop = button("", "", `Leave ${file.name || "it"} out`, () => { attached = attached.filter(other => other !== one); drop.remove(); });
      drop.append(picture(one.url, shown));
      attached.push(one);
      $("attached").append(drop);
    };
    reader.readAsDataURL(file);
  }
}
/* The content of a turn: a text, or parts if pictures come with it. */
function contentWith(text) {
  const parts = attached.map(one => one.video ? { type: "video_url", video_url: { url: one.url } } : { type: "image_url", image_url: { url: one.url } });
  attached = [];
  $("attached").replaceChildren();
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}
$("attach").onclick = () => $("files").click();
$("files").onchange = () => { attach($("files").files); $("files").value = ""; $("text").focus(); };
$("text").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attach(files); }
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
