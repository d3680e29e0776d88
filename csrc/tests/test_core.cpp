// The core's own tests: test_core [PART_OF_A_NAME...] runs the cases whose name contains one of the parts, or all.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "control/control_block.h"
#include "harness.h"
#include "ranks.h"

namespace phalanx::tests {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

namespace {

bool run(const Case& test) {
  std::string error;
  const double seconds = seconds_of([&] {
    try {
      test.body();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  });
  std::printf("%-6s %s (%.2f s)\n", error.empty() ? "ok" : "FAILED", test.name, seconds);
  if (!error.empty()) std::printf("       %s\n", error.c_str());
  std::fflush(stdout);
  return error.empty();
}

}  // namespace
}  // namespace phalanx::tests

int main(int num_args, char** args) {
  using namespace phalanx;
  int num_run = 0, num_failed = 0;
  for (const tests::Case& test : tests::cases()) {
    const bool wanted = num_args == 1 || std::any_of(args + 1, args + num_args, [&](const char* part) {
                          return std::strstr(test.name, part) != nullptr;
                        });
    if (!wanted) continue;
    ++num_run;
    if (!tests::run(test)) ++num_failed;
  }
  std::printf("%d cases, %d failed\n", num_run, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
