"""Texts that would run in a page, or break it, if the page took them for more than texts."""

from __future__ import annotations

HIT = "window.HIT=(window.HIT||0)+1;document.title='HIT';new Image().src='http://127.0.0.1:9/hit'"
MARKUP = [
    f"<script>{HIT}</script>",
    f"</script><script>{HIT}</script>",
    f"</pre></td></dd></p></title></style><script>{HIT}</script>",
    f"<!-- <script> --!><script>{HIT}</script>",
    f"<!--<script>{HIT}",
    f'<img src=x onerror="{HIT}">',
    f"\"'><svg/onload={HIT.replace(' ', '/**/')}>",
    f'"onmouseover="{HIT}" autofocus onfocus="{HIT}" x="',
    f'<iframe srcdoc="<script>parent.eval(`{HIT}`)</script>"></iframe>',
    f'<a href="javascript:{HIT}">a link</a>',
    f"javascript:{HIT}//",
    '<meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/refresh">',
    '<base href="http://127.0.0.1:9/"><link rel="stylesheet" href="http://127.0.0.1:9/sheet">',
    "<style>@import 'http://127.0.0.1:9/import';*{display:none}</style>",
    '<form action="http://127.0.0.1:9/form"><button>send</button></form>',
    f'<math><mi xlink:href="data:x,<script>{HIT}</script>"></math><object data="data:text/html,x">',
    f"]]><script>{HIT}</script>",
    f'"}};{HIT};//',
    "{{ 7 * 7 }}{% raw %}${7 * 7}",
    "&lt;script&gt;&#60;script&#62;",
]
UNSEEN = [
    f"\u2028{HIT}\u2029{HIT}",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "a\x00b<scr\x00ipt>",
    "\u202egnp.exe\u2066\r\n",
    "-->\ud800<",
]
LONG = ["W" * 5000, "<b>" * 2000, "word " * 1000]
TEXTS = MARKUP + UNSEEN + LONG
