// SPDX-License-Identifier: Apache-2.0
// Looks into checkpoints, checks them, and makes one form of another. Needs neither the optimizer
// nor the ranks that saved them, and a buffer or two of 1 MiB.
//
//     zero-checkpoint inspect run/step-1000
//     zero-checkpoint verify run/step-1000
//     zero-checkpoint consolidate run/step-1000 model.safetensors
//     zero-checkpoint weights run/step-1000 weights.safetensors
//     zero-checkpoint split model.safetensors 8 run/for-8
//     zero-checkpoint to-torch run/step-1000 optimizer.safetensors
//     zero-checkpoint --help
//
// Exits with 0; with 1 where a checkpoint is damaged or a file can't be read or written; with 2
// where the command line can't be followed.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>
#include <zero/checkpoint/checkpoint.hpp>
#include <zero/checkpoint/convert.hpp>
#include <zero/checkpoint/torch.hpp>
#include <zero/config.hpp>
#include <zero/error.hpp>

#include "inspect.hpp"

namespace {

/// What the command line says.
struct Options {
  std::filesystem::path from, to;
  bool json = false;
  int world = 0;
};

/// Checked whole, so that no damaged checkpoint is made another's source.
zero::Checkpoint open_whole(const std::filesystem::path& path) {
  zero::Checkpoint checkpoint(path);
  checkpoint.verify();
  return checkpoint;
}

std::string version() {
  return std::to_string(ZERO_VERSION_MAJOR) + "." + std::to_string(ZERO_VERSION_MINOR) + "." +
         std::to_string(ZERO_VERSION_PATCH);
}

void wrote(const std::filesystem::path& path) { std::printf("wrote %s\n", path.string().c_str()); }

/// Said before the checkpoint is read, which may take long. Empty: it may be written.
std::string may_be_file(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return {};
  return path + " is a folder; name a file in it: " +
         (std::filesystem::path(path) / "model.safetensors").string();
}
std::string may_be_folder(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored) || std::filesystem::is_directory(path, ignored)) {
    return {};
  }
  return path + " is no folder; name another, which may be a new one";
}

void add_file(CLI::App& command, Options& options) {
  command.add_option("FILE", options.to, "to be written")->required()->check(may_be_file);
}

void add_commands(CLI::App& app, Options& options) {
  const auto command = [&](const char* name, const std::string& description) {
    CLI::App* const added = app.add_subcommand(name, description);
    added->add_option("PATH", options.from, "a folder that zero::save wrote, or a single file")
        ->required();
    return added;
  };

  CLI::App* inspect = command("inspect", "Prints what is in a checkpoint");
  inspect->add_flag("--json", options.json, "as JSON");
  inspect->callback([&] {
    const zero::Checkpoint checkpoint(options.from);
    const std::string text =
        options.json ? checkpoint_tool::json_of(checkpoint) : checkpoint_tool::table_of(checkpoint);
    std::fputs(text.c_str(), stdout);
  });

  command("verify", "Reads all of a checkpoint and compares its checksums")->callback([&] {
    const zero::Checkpoint checkpoint = open_whole(options.from);
    std::printf("%s is whole: %s\n", options.from.string().c_str(),
                checkpoint_tool::summary_of(checkpoint).c_str());
  });

  CLI::App* consolidate = command(
      "consolidate", "Writes a checkpoint as one safetensors file, tensors in their own shapes");
  add_file(*consolidate, options);
  consolidate->callback([&] {
    zero::consolidate(open_whole(options.from), options.to);
    wrote(options.to);
  });

  CLI::App* weights = command(
      "weights", "Writes the parameters' values alone as one safetensors file, for any reader");
  add_file(*weights, options);
  weights->callback([&] {
    zero::save_weights(open_whole(options.from), options.to);
    wrote(options.to);
  });

  CLI::App* split =
      command("split", "Writes a checkpoint into a folder, as so many ranks would have saved it");
  split->add_option("RANKS", options.world, "how many")->required()->check(CLI::Range(1, 100'000));
  split->add_option("FOLDER", options.to, "to be written; made if need be")
      ->required()
      ->check(may_be_folder);
  split->callback([&] {
    zero::split(open_whole(options.from), options.to, options.world);
    wrote(options.to);
  });

  CLI::App* to_torch = command(
      "to-torch", "Writes the optimizer's state as a PyTorch optimizer loads it: torch_state.py");
  add_file(*to_torch, options);
  to_torch->callback([&] {
    zero::save_torch(open_whole(options.from), options.to);
    wrote(options.to);
  });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Looks into checkpoints, checks them, and makes one form of another."};
  Options options;
  add_commands(app, options);
  app.require_subcommand(1);
  app.set_version_flag("--version", "zero " + version(), "Prints zero's version");
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::fputs("zero-checkpoint: the output can't be written\n", stderr);
      return 1;
    }
    return 0;
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForAllHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForVersion& version) {
    return app.exit(version);
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    const std::string what = app.get_subcommands().empty() && !unknown.empty()
                                 ? "there is no command " + unknown.front()
                                 : error.what();
    std::fprintf(stderr, "zero-checkpoint: %s; see zero-checkpoint --help\n", what.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zero-checkpoint: %s\n", error.what());
    return 1;
  }
}
