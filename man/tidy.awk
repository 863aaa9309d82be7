# scdoc begins a paragraph before and behind every heading, and ends every list with one: harmless, but mandoc -Tlint
# complains of each.
/^\.P$/ { held = previous !~ /^\.S[HS]/; next }
{ if (held && !/^\.(SH|SS|RE)/) print ".P"; held = 0; print; previous = $0 }
