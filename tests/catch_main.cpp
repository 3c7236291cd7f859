// SPDX-License-Identifier: Apache-2.0
// Version 2 puts its implementation wherever this is defined; version 3 ignores it.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

int main(int argc, char** argv) { return Catch::Session().run(argc, argv); }
