// A step's draft tree: where its boxes lie, and the drawing.

/**
 * Place a step's root, nodes and own token: depth to the right, leaves downwards, a parent in the middle of its children.
 * Return boxes {kind, node, text, numbers, depth, line, parent}, `parent` an index of boxes, and the number of lines.
 */
function placeTree(step) {
  const boxes = [{ kind: "root", text: shown(step.root.text, step.root.token), numbers: "root", depth: 0, parent: -1 }];
  let last = 0;
  step.nodes.forEach((node, index) => {
    const parent = node.parent + 1;
    const path = node.value === null ? null : Math.exp(node.value);
    boxes.push({
      kind: node.accepted ? "accepted" : "node", text: shown(node.text, node.token),
      numbers: `path ${percent(path)} · target ${percent(node.target_prob)}`, depth: boxes[parent].depth + 1, parent,
    });
    if (node.accepted) last = index + 1;
  });
  const own = step.output.find((token) => !token.accepted);
  if (own) {
    boxes.push({ kind: "own", text: shown(own.text, own.token), numbers: "the target's own", depth: boxes[last].depth + 1, parent: last });
  }
  const children = boxes.map(() => []);
  boxes.forEach((box, index) => { if (index) children[box.parent].push(index); });
  let lines = 0;
  const place = (index) => {
    children[index].forEach(place);
    const below = children[index].map((child) => boxes[child].line);
    boxes[index].line = below.length ? (below[0] + below[below.length - 1]) / 2 : lines++;
  };
  place(0);
  return { boxes, lines };
}
