"""Measurements of the package: speed against peers, studies of learning, simulators, size and layout.

A measurement is a module with a command. It writes rows (JSON files) into docs/results, and the page, or the
part of a page, that is made of them.

    pages        rows, tables, intervals, pages
    options      command lines
    studies/     one file per study, `<study>_page` where its page is long; `definitions` says what `learning`
                 runs, `once` makes demonstrations and runs, `rows` says what a row holds, `verify` checks all
    speed/       `cases_*` measure, `peers*` are what ours is compared with, `sides` has both at equal sizes
                 and weights, `timing` takes the time, `page` writes the tables
    simulators/  `__main__` measures, a file per family has its rows, `sides` what they share

Files beside these measure one thing each; `chromium` drives a browser for `draw` and `studies.lab`.
"""
