"""A run, or several beside each other, as a page for a browser: a pure function of journals.

The way in is `offbeat.report.page.write_report`. Nothing is imported here, so that the
command line answers without numpy."""
