// A small test harness: named cases that register themselves, and checks that name their file and line.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace phalanx::tests {

struct Case {
  const char* name;
  void (*body)();
};
std::vector<Case>& cases();  // defined in test_core.cpp

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

/// A check that failed. It ends the case, or the rank that made the check.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail_check(const char* file, int line, const std::string& text) {
  const std::string path = file;
  throw CheckFailed(path.substr(path.rfind('/') + 1) + ":" + std::to_string(line) + ": " + text);
}

#define CASE(name)                                                       \
  static void name();                                                    \
  static const ::phalanx::tests::Register registered_##name(#name, name); \
  static void name()
#define CHECK(condition) \
  ((condition) ? void() : ::phalanx::tests::fail_check(__FILE__, __LINE__, "not true: " #condition))
/// CHECK_EQ(a, b) or CHECK_EQ(a, b, "where the values come from")
#define CHECK_EQ(a, ...) \
  ::phalanx::tests::check_equal(#a " == " #__VA_ARGS__, __FILE__, __LINE__, a, __VA_ARGS__)
#define CHECK_CONTAINS(text, part)                                                                          \
  (std::string(text).find(part) != std::string::npos                                                        \
       ? void()                                                                                             \
       : ::phalanx::tests::fail_check(__FILE__, __LINE__, "'" + std::string(part) + "' is not in: " + (text)))

template <class A, class B>
void check_equal(const char* expression, const char* file, int line, const A& a, const B& b,
                    const std::string& where = {}) {
  if (a == b) return;
  std::ostringstream text;
  text << expression << ": " << a << " is not " << b << (where.empty() ? "" : ", ") << where;
  fail_check(file, line, text.str());
}

}  // namespace phalanx::tests
