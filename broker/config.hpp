// gcoalesced's options: flags, environment, configuration file (TOML), defaults, in this order.
#pragma once

#include <optional>
#include <string>

#include "base/log.hpp"
#include "broker/coalescer.hpp"
#include "broker/producer.hpp"
#include "broker/store.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

struct Config {
    Instance instance;
    std::string upstream = "https://generativelanguage.googleapis.com";
    std::string ca_file;
    std::string proxy;
    std::string api_key_file;
    std::string state_dir; // of snapshots; "": none are kept
    std::uint64_t snapshot_bytes = 256 << 20;
    std::string templates_dir; // "": the default template alone
    std::optional<std::uint32_t> admin_group;
    std::uint64_t memory = 48 << 20;
    StoreOptions store;
    TemplateSettings settings; // what templates do not say themselves
    ProducerLimits producer;
    CoalescerLimits limits;
    Nanos drain_timeout = 10 * kSecond;
    LogLevel log_level = LogLevel::info;
};

// Reads the command line. Nothing to run (help, version, a usage error, which it has printed): the exit code instead.
struct Parsed {
    std::optional<Config> config;
    int exit_code = 0;
};
Parsed parse_command_line(int argc, char** argv);

} // namespace gcoalesce
