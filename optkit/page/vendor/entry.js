// What optkit's charts name as marks, and nothing else of Observable Plot: the bundle holds what is listed here.
export { plot, dot, lineY, link, text, tickX, ruleX, ruleY, rect, barX, tip, pointer } from "@observablehq/plot";
export { format } from "d3-format";
