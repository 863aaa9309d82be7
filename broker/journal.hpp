// The log with fields, where standard error is systemd's journal.
#pragma once

#include <string>

namespace gcoalesce {

// From now on log lines go to the journal by its own protocol, if standard error is connected to it (systemd.exec(5),
// $JOURNAL_STREAM): with PRIORITY, GCOALESCE_INSTANCE and the fields of each line. Else nothing changes. At start,
// before other threads.
void log_to_journal(const std::string& instance);

} // namespace gcoalesce
