// gcoalesce __complete: what may stand next on a command line. The shells' scripts in packaging/completions ask it, so
// that they know of every command and option, and of live keys and templates.
#include <CLI/App.hpp>
#include <algorithm>
#include <fmt/format.h>
#include <set>

#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

bool takes_value(const CLI::Option& option) {
    return option.get_items_expected_max() > 0;
}

// By any of its names, of this command or, since options may stand behind the command too, of those around it.
const CLI::Option* find_option(const CLI::App* at, const std::string& name) {
    for (; at != nullptr; at = at->get_parent()) {
        if (const CLI::Option* option = at->get_option_no_throw(name)) return option;
    }
    return nullptr;
}

class Completer {
  public:
    Completer(const CLI::App& app, const Context& context) : at_(&app), context_(context) {}

    // A word that is whole.
    void read(const std::string& word) {
        if (pending_ != nullptr) {
            if (word == "=") return; // bash splits --name=value in three
            take_value(*pending_, word);
            pending_ = nullptr;
        } else if (!only_values_ && word == "--") {
            only_values_ = true;
        } else if (!only_values_ && word.starts_with('-') && word.size() > 1) {
            const std::size_t equals = word.find('=');
            const CLI::Option* option = find_option(at_, word.substr(0, equals));
            if (option == nullptr || !takes_value(*option)) return;
            if (equals == std::string::npos)
                pending_ = option;
            else
                take_value(*option, word.substr(equals + 1));
        } else if (const CLI::App* command = values_ == 0 ? command_named(word) : nullptr) {
            at_ = command;
        } else {
            ++values_;
        }
    }

    // The one that is being typed.
    std::string candidates(const std::string& word) {
        word_ = word;
        const std::size_t equals = word.find('=');
        if (pending_ != nullptr) {
            if (word == "=") word_.clear();
            add_values(*pending_, false);
        } else if (only_values_ || !word.starts_with('-')) {
            if (values_ == 0 && !only_values_) add_commands();
            if (const CLI::Option* positional = next_positional()) add_values(*positional, true);
        } else if (equals == std::string::npos) {
            add_options();
        } else if (const CLI::Option* option = find_option(at_, word.substr(0, equals))) {
            before_ = word.substr(0, equals + 1);
            word_ = word.substr(equals + 1);
            add_values(*option, false);
        }
        return out_;
    }

  private:
    void add(const std::string& candidate, std::string_view description) {
        if (!candidate.starts_with(word_) || !added_.insert(candidate).second) return;
        const std::string_view line = description.substr(0, description.find('\n'));
        out_ += fmt::format("{}{}\t{}\n", before_, candidate, escape_line(line));
    }

    void take_value(const CLI::Option& option, const std::string& value) {
        if (option.check_name("--instance")) context_.instance = value;
        if (option.check_name("--runtime-dir")) context_.runtime_dir = value;
    }

    const CLI::App* command_named(const std::string& name) const {
        for (const CLI::App* command : at_->get_subcommands([](const CLI::App*) { return true; })) {
            if (command->get_name() == name) return command;
        }
        return nullptr;
    }

    const CLI::Option* next_positional() const {
        const CLI::Option* last = nullptr;
        std::size_t left = values_;
        for (const CLI::Option* option : at_->get_options()) {
            if (!option->get_positional()) continue;
            if (left-- == 0) return option;
            last = option;
        }
        return last != nullptr && last->get_items_expected_max() > 1 ? last : nullptr; // it takes all the rest
    }

    void add_commands() {
        for (const CLI::App* command : at_->get_subcommands([](const CLI::App*) { return true; }))
            add(command->get_name(), command->get_description());
    }

    void add_options() {
        for (const CLI::App* app = at_; app != nullptr; app = app->get_parent()) {
            for (const CLI::Option* option : app->get_options()) {
                if (option->get_group().empty() || (app != at_ && option->check_name("--version"))) continue;
                for (const std::string& name : option->get_lnames()) add("--" + name, option->get_description());
                if (word_ == "-") {
                    for (const std::string& name : option->get_snames()) add("-" + name, option->get_description());
                }
            }
        }
    }

    // What kind of thing it takes stands where --help shows it.
    void add_values(const CLI::Option& option, bool positional) {
        const std::string type = option.get_type_name(); // with "{…}" of a choice
        const std::string kind = positional && type.find('{') == std::string::npos ? option.get_name(true) : type;
        const std::size_t choice = type.find('{');
        if (choice != std::string::npos) {
            const std::string all = type.substr(choice + 1, type.find('}') - choice - 1);
            for (const std::string& one : CLI::detail::split(all, ',')) add(one, "");
        } else if (kind == "ID") {
            add_templates();
        } else if (kind.starts_with("KEY") || kind.starts_with("STREAM") || (positional && kind == "NAME")) {
            add_streams(kind == "STREAM.NUMBER");
        } else if (kind == "MODEL") {
            add_models();
        } else if (kind.starts_with("FILE") || kind == "PATH") {
            out_ += ":files\n";
        } else if (kind == "DIR") {
            out_ += ":dirs\n";
        }
    }

    // Nobody is told why there is none.
    const SegmentView* segment() {
        if (!opened_) {
            const Result<Instance> instance = resolve_instance(context_.instance.c_str(), context_.runtime_dir.c_str());
            opened_ = instance ? open_segment(*instance) : Result<OpenSegment>(tl::unexpected(instance.error()));
        }
        return *opened_ ? &(*opened_)->view : nullptr;
    }

    void add_templates() {
        const SegmentView* view = segment();
        if (view == nullptr) return;
        const Nanos now = system_clock().monotonic();
        for (const TemplateFacts& facts : all_templates(*view))
            add(facts.id(), fmt::format("window {}", window_words(facts.window_remaining(now))));
    }

    void add_streams(bool by_id) {
        const SegmentView* view = segment();
        if (view == nullptr) return;
        const Nanos now = system_clock().monotonic();
        for (const StreamFacts& stream : all_streams(*view)) { // of a key with several, the newest
            const std::string key = to_hex(stream.key);
            const std::string name =
                by_id ? to_hex(stream.opening.stream_id) : key.substr(0, std::max<std::size_t>(8, word_.size()));
            add(name, fmt::format("{} {}, {} old", template_name(*view, stream.opening.template_index), stream.state(),
                                  format_duration(now - stream.opening.opened_ns)));
        }
    }

    void add_models() {
        const SegmentView* view = segment();
        if (view == nullptr) return;
        for (const StreamFacts& stream : all_streams(*view)) add(std::string(stream.opening.model.view()), "");
    }

    const CLI::App* at_;
    Context context_;
    const CLI::Option* pending_ = nullptr; // whose value comes next
    bool only_values_ = false;             // behind "--"
    std::size_t values_ = 0;               // of the command so far
    std::string word_, before_, out_;
    std::set<std::string> added_;
    std::optional<Result<OpenSegment>> opened_;
};

} // namespace

void complete(const CLI::App& app, const Context& context, const std::vector<std::string>& words) {
    Completer completer(app, context);
    for (std::size_t i = 0; i + 1 < words.size(); ++i) completer.read(words[i]);
    write_out(completer.candidates(words.empty() ? "" : words.back()));
}

} // namespace gcoalesce::cli
