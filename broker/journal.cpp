#include "broker/journal.hpp"

#include <cstdlib>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>

#include "base/log.hpp"

namespace gcoalesce {
namespace {

bool stderr_is_journal() {
    const char* stream = std::getenv("JOURNAL_STREAM");
    struct stat file {};
    return stream != nullptr && ::fstat(STDERR_FILENO, &file) == 0 &&
           stream == fmt::format("{}:{}", file.st_dev, file.st_ino);
}

} // namespace

void log_to_journal(const std::string& instance) {
    if (!stderr_is_journal()) return;
    set_log_sink([instance](LogLevel level, std::string_view line, LogFields fields) {
        std::vector<std::string> entries{fmt::format("PRIORITY={}", static_cast<int>(level)),
                                         fmt::format("MESSAGE={}", line), "SYSLOG_IDENTIFIER=gcoalesced",
                                         "GCOALESCE_INSTANCE=" + instance};
        for (const LogField& field : fields) entries.push_back(fmt::format("GCOALESCE_{}={}", field.name, field.value));
        std::vector<iovec> parts;
        for (std::string& entry : entries) parts.push_back({entry.data(), entry.size()});
        return ::sd_journal_sendv(parts.data(), static_cast<int>(parts.size())) == 0;
    });
}

} // namespace gcoalesce
