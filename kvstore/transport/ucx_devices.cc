#include "kvstore/transport/ucx_devices.h"

#include <ucs/type/status.h>
#include <uct/api/uct.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace kvt {
namespace {

void AddDevicesOf(uct_component_h component, const char* domain, std::vector<UcxDevice>* out) {
  uct_md_config_t* config = nullptr;
  if (uct_md_config_read(component, nullptr, nullptr, &config) != UCS_OK) return;
  uct_md_h md = nullptr;
  const ucs_status_t opened = uct_md_open(component, domain, config, &md);
  uct_config_release(config);
  if (opened != UCS_OK) return;  // no such hardware
  uct_tl_resource_desc_t* resources = nullptr;
  unsigned count = 0;
  if (uct_md_query_tl_resources(md, &resources, &count) == UCS_OK) {
    for (unsigned i = 0; i < count; ++i) {
      out->push_back(UcxDevice{resources[i].tl_name, resources[i].dev_name,
                               resources[i].dev_type == UCT_DEVICE_TYPE_NET});
    }
    uct_release_tl_resource_list(resources);
  }
  uct_md_close(md);
}

}  // namespace

absl::StatusOr<std::vector<UcxDevice>> ListUcxDevices() {
  uct_component_h* components = nullptr;
  unsigned count = 0;
  const ucs_status_t status = uct_query_components(&components, &count);
  if (status != UCS_OK) {
    return absl::UnavailableError(
        absl::StrCat("ucx: listing its components: ", ucs_status_string(status)));
  }
  std::vector<UcxDevice> devices;
  for (unsigned i = 0; i < count; ++i) {
    uct_component_attr_t attr{};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
    if (uct_component_query(components[i], &attr) != UCS_OK) continue;
    std::vector<uct_md_resource_desc_t> domains(attr.md_resource_count);
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
    attr.md_resources = domains.data();
    if (domains.empty() || uct_component_query(components[i], &attr) != UCS_OK) continue;
    for (const uct_md_resource_desc_t& domain : domains) {
      AddDevicesOf(components[i], domain.md_name, &devices);
    }
  }
  uct_release_component_list(components);
  return devices;
}

bool NeedsLockedMemory(absl::string_view transport) {
  return absl::StartsWith(transport, "rc") || absl::StartsWith(transport, "dc") ||
         absl::StartsWith(transport, "ud") || transport == "ib";
}

absl::Status CheckNetDevices(const std::vector<UcxDevice>& devices, absl::string_view net_devices) {
  std::vector<std::string> known;
  for (const UcxDevice& device : devices) {
    if (device.network && std::find(known.begin(), known.end(), device.device) == known.end()) {
      known.push_back(device.device);
    }
  }
  for (absl::string_view name : absl::StrSplit(net_devices, ',', absl::SkipEmpty())) {
    if (absl::StartsWith(name, "^")) name.remove_prefix(1);
    // A port may be left out, and UCX takes shell patterns, which are left to it.
    const bool pattern = name.find_first_of("*?[") != absl::string_view::npos;
    const bool found = name == "all" || pattern ||
                       std::any_of(known.begin(), known.end(), [name](const std::string& device) {
                         return device == name || absl::StartsWith(device, absl::StrCat(name, ":"));
                       });
    if (found) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "ucx: no network device '", name, "' on this host (ucx_net_devices or UCX_NET_DEVICES); ",
        known.empty() ? "there is none" : absl::StrCat("there are: ", absl::StrJoin(known, ", "))));
  }
  return absl::OkStatus();
}

}  // namespace kvt
