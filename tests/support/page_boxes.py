"""Where a browser has put a page's words: those that lie on top of each other."""

from __future__ import annotations

from typing import Any

OVERLAPS = """
() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.textContent.trim() || ["OPTION", "STYLE", "SCRIPT"].includes(node.parentElement.tagName)) continue;
    if (node.parentElement.closest("details:not([open]) > :not(summary)")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let clip = {left: -Infinity, right: Infinity, top: -Infinity, bottom: Infinity};
    for (let up = node.parentElement; up; up = up.parentElement) {
      if (getComputedStyle(up).overflowX === "visible") continue;
      const box = up.getBoundingClientRect();
      clip = {left: Math.max(clip.left, box.left), right: Math.min(clip.right, box.right),
              top: Math.max(clip.top, box.top), bottom: Math.min(clip.bottom, box.bottom)};
    }
    for (const box of range.getClientRects()) {
      const seen = {left: Math.max(box.left, clip.left), right: Math.min(box.right, clip.right),
                    top: Math.max(box.top, clip.top), bottom: Math.min(box.bottom, clip.bottom)};
      const text = node.textContent.trim();
      if (seen.right - seen.left > 1 && seen.bottom - seen.top > 1) boxes.push({...seen, node, text});
    }
  }
  const found = [];
  for (let a = 0; a < boxes.length; a++) for (let b = a + 1; b < boxes.length; b++) {
    const one = boxes[a], two = boxes[b];
    if (one.node === two.node) continue;
    const wide = Math.min(one.right, two.right) - Math.max(one.left, two.left);
    const high = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
    if (wide > 1 && high > 3) found.push(`${one.text} | ${two.text}`);
  }
  return found;
}
"""


def overlaps(page: Any, widths: tuple[int, ...] = (400, 900, 1600)) -> list[str]:
    """Pairs of texts that share a place, on screens of these widths in pixels. page: playwright's."""
    found = []
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        found += [f"{width}: {pair}" for pair in page.evaluate(OVERLAPS)]
    return found
