// One HTTP request, by libcurl.
#pragma once

#include <string>
#include <vector>

namespace gcoalesce::test {

struct HttpResponse {
    int status = 0;    // 0: none came
    std::string head;  // status line and header fields, as sent
    std::string body;  // as much of it as came
    std::string error; // libcurl's words; "": the response came whole
};

// body "": GET, else POST. Each header is a whole line, "name: value". Thread-safe; throws only where libcurl has no
// memory. A watchdog ends it after a minute.
HttpResponse http(const std::string& url, const std::string& body = {}, const std::vector<std::string>& headers = {});

} // namespace gcoalesce::test
