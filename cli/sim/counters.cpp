#include "cli/sim/counters.hpp"

#include <nlohmann/json.hpp>

namespace gcoalesce::sim {

std::string Counters::json() const {
    const nlohmann::ordered_json document{{"calls", calls},
                                          {"in_flight", in_flight},
                                          {"most_in_flight", most_in_flight},
                                          {"aborted", aborted},
                                          {"by_body", by_body},
                                          {"by_status", by_status},
                                          {"connections", connections},
                                          {"open_connections", open_connections}};
    return document.dump(2) + "\n";
}

void Counters::reset() {
    calls = aborted = connections = 0;
    most_in_flight = in_flight;
    by_body.clear();
    by_status.clear();
}

} // namespace gcoalesce::sim
