// Headings of the sidebar have a level, and boxes that scroll sideways can be scrolled with the keyboard.
for (const heading of document.querySelectorAll("[role=heading]:not([aria-level])")) heading.ariaLevel = "2";
document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
document.querySelector(".toc-drawer")?.setAttribute("aria-label", "Contents of this page");

function focusScrolledBoxes() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .cell_output .output, .cell_output .output *")) {
    const scrolls = box.scrollWidth > box.clientWidth && ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    if (scrolls && !box.hasAttribute("tabindex")) box.tabIndex = 0;
  }
}
addEventListener("load", focusScrolledBoxes);
addEventListener("resize", focusScrolledBoxes);
