#include "broker/policy.hpp"

#include <grp.h>

#include "templates/template.hpp"

namespace gcoalesce {

bool TemplateSettings::checked() const {
    return file && file->schema;
}

std::string_view TemplateSettings::source() const {
    return file ? std::string_view(file->source) : std::string_view();
}

Result<TemplateSettings> settings_of(Template file, const TemplateSettings& defaults) {
    TemplateSettings settings = defaults;
    settings.id = file.id;
    settings.revision = file.revision;
    if (file.id != kDefaultTemplate) settings.kv_ttl = 600 * kSecond;
    const auto take = [](Nanos& to, const std::optional<Nanos>& from) { to = from.value_or(to); };
    take(settings.ttl_idle, file.ttl_idle);
    take(settings.ttl_window, file.ttl_window);
    take(settings.window, file.window);
    take(settings.linger, file.linger);
    take(settings.snapshot_ttl, file.snapshot_ttl);
    take(settings.kv_after, file.kv_after);
    take(settings.kv_ttl, file.kv_ttl);
    settings.snapshots = file.snapshots;
    settings.cancel_after = file.cancel_after;
    settings.in_flight = file.limits.in_flight;
    settings.calls_a_minute = file.limits.calls_a_minute;
    if (file.limits.subscribers != 0) settings.subscribers = file.limits.subscribers;
    settings.stream_bytes = file.limits.stream_bytes.value_or(settings.stream_bytes);
    settings.pool_share = file.limits.pool_share.value_or(settings.pool_share);
    settings.max_individual = file.max_individual;
    settings.strict_individual = file.strict_individual;
    settings.live = file.delivery == TemplateDelivery::live;
    settings.realms = file.realm == TemplateRealm::token;
    settings.explicit_keys = file.explicit_keys;
    if (file.allow) {
        settings.uids = file.allow->uids;
        settings.groups = file.allow->gids;
        for (const std::string& name : file.allow->groups) {
            const group* found = ::getgrnam(name.c_str());
            if (found == nullptr)
                return fail(GCOALESCE_BAD_REQUEST, "template \"{}\": /allow/groups: there is no group \"{}\" here",
                            settings.id, name);
            settings.groups.push_back(found->gr_gid);
        }
    }
    settings.file = std::make_shared<const Template>(std::move(file));
    return settings;
}

Result<std::vector<TemplateSettings>> load_settings(const std::string& directory, const TemplateSettings& defaults) {
    std::vector<TemplateSettings> all{defaults};
    if (directory.empty()) return all;
    Result<std::vector<Template>> files = load_templates(directory);
    if (!files) return tl::unexpected(files.error());
    for (Template& file : *files) {
        Result<TemplateSettings> settings = settings_of(std::move(file), defaults);
        if (!settings) return tl::unexpected(settings.error());
        if (settings->id == kDefaultTemplate)
            all.front() = std::move(*settings);
        else
            all.push_back(std::move(*settings));
    }
    return all;
}

} // namespace gcoalesce
