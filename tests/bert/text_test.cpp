// SPDX-License-Identifier: Apache-2.0
// The BERT example's text, batches, memory readings and traces. No threads.
#include <stdlib.h>  // mkdtemp

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "../../examples/bert/batch.hpp"
#include "../../examples/bert/input_error.hpp"
#include "../../examples/bert/process_memory.hpp"
#include "../../examples/bert/text.hpp"
#include "../../examples/bert/trace.hpp"
#include "catch.hpp"

namespace {

using bert::Batch;
using bert::Corpus;
using bert::InputError;
using bert::SpecialToken;
using bert::SyntheticSource;
using bert::TextSource;
using bert::Vocabulary;
using Catch::Matchers::ContainsSubstring;
using std::filesystem::path;
using Words = std::vector<std::string>;

/// A folder of this test's own, gone with it.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "bert_text_test.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  [[nodiscard]] const path& root() const { return path_; }
  path write(const path& name, const std::string& text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
    return path_ / name;
  }

 private:
  path path_;
};

std::string read(std::initializer_list<path> paths) {
  return bert::read_texts(std::vector<path>(paths));
}

/// `count` distinct words, one after the other and again, so that each place tells its word.
Words counting_words(std::size_t count, std::size_t times) {
  Words words;
  for (std::size_t i = 0; i < count * times; ++i) {
    words.push_back("w" + std::to_string(1000 + i % count));
  }
  return words;
}

bool same(const Batch& a, const Batch& b) {
  return a.tokens == b.tokens && a.segments == b.segments && a.positions == b.positions &&
         a.labels == b.labels && a.weights == b.weights;
}

}  // namespace

TEST_CASE("words are lower-cased and punctuation stands alone") {
  CHECK(bert::words_of("") == Words{});
  CHECK(bert::words_of(" \t\r\n") == Words{});
  CHECK(bert::words_of("The GNU GPL, version 2.0 (or 3a)!") ==
        Words{"the", "gnu", "gpl", ",", "version", "2", ".", "0", "(", "or", "3a", ")", "!"});
  CHECK(bert::words_of("don't--[MASK]") == Words{"don", "'", "t", "-", "-", "[", "mask", "]"});
  CHECK(bert::words_of("Na\xC3\xAFve \xC2\xA9 2") == Words{"na\xC3\xAFve", "\xC2\xA9", "2"});
  CHECK(bert::words_of(std::string("a\0b\x7f", 4)) == Words{"a", "b"});
  // Each printable ASCII character is a word's or a token of its own: none is lost.
  for (char c = '!'; c <= '~'; ++c) {
    CHECK(bert::words_of(std::string("a ") + c + " b").size() == 3);
  }
}

TEST_CASE("a vocabulary orders words by frequency, then by alphabet") {
  const Words words = bert::words_of("b c a b . c d");
  const Vocabulary vocabulary(words);
  REQUIRE(vocabulary.size() == 10);
  const Words expected{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "b", "c", ".", "a", "d"};
  for (std::int32_t id = 0; id < 10; ++id) {
    CHECK(vocabulary.token(id) == expected[static_cast<std::size_t>(id)]);
    CHECK(vocabulary.id(vocabulary.token(id)) == id);
  }
  CHECK(vocabulary.id("elsewhere") == SpecialToken::unk);

  const Vocabulary smallest(words, Vocabulary::minimum_size);
  CHECK(smallest.size() == 7);
  CHECK(smallest.id("c") == 6);
  const Corpus corpus(words, smallest);
  CHECK(std::vector(corpus.tokens().begin(), corpus.tokens().end()) ==
        std::vector<std::int32_t>{5, 6, 1, 5, 1, 6, 1});

  CHECK(Vocabulary(words, 0, 8).size() == 8);
  CHECK(Vocabulary(words, 10, 8).size() == 10);  // `at_most` bounds what nobody asked for
}

TEST_CASE("a vocabulary that the text can't give is refused in words") {
  const Words words = bert::words_of("b c a b . c d");
  CHECK_THROWS_WITH(Vocabulary(words, 11), ContainsSubstring("11 tokens") &&
                                               ContainsSubstring("5 distinct words") &&
                                               ContainsSubstring("at most 10"));
  CHECK_THROWS_WITH(Vocabulary(words, 6), ContainsSubstring("at least 7"));
  CHECK_THROWS_WITH(Vocabulary(words, 0, 3), ContainsSubstring("at least 7"));
  CHECK_THROWS_WITH(Vocabulary(Words{"a", "a"}), ContainsSubstring("1 distinct words"));
  CHECK_THROWS_AS(Vocabulary(Words{}), InputError);
}

TEST_CASE("texts are read whole, and what can't be read is named") {
  const Folder folder;
  const path one = folder.write("one.txt", "one"), two = folder.write("two.txt", "two\n");
  CHECK(read({one, two}) == "one\ntwo\n");
  CHECK_THROWS_WITH(read({one, folder.root() / "absent"}),
                    ContainsSubstring("absent") && ContainsSubstring("No such file"));
  CHECK_THROWS_WITH(read({folder.root()}), ContainsSubstring("directory"));
  CHECK_THROWS_WITH(read({folder.write("empty", "")}), ContainsSubstring("it is empty"));
  CHECK_THROWS_AS(read({}), InputError);

  std::filesystem::create_symlink("one.txt", folder.root() / "link.txt");
  std::filesystem::create_directory(folder.root() / "sub");
  CHECK(bert::default_texts(folder.root()) == std::vector<path>{folder.root() / "empty", one, two});
  CHECK_THROWS_WITH(bert::default_texts(folder.root() / "sub"), ContainsSubstring("--text FILE"));
  CHECK_THROWS_WITH(bert::default_texts(folder.root() / "absent"),
                    ContainsSubstring("--text FILE") && ContainsSubstring("No such file"));
}

TEST_CASE("the default texts give a vocabulary") {
  if (!std::filesystem::exists("/usr/share/common-licenses")) return;  // not Debian
  const Words words = bert::words_of(bert::read_texts(bert::default_texts()));
  const Vocabulary vocabulary(words);
  CHECK(words.size() > 30'000);
  CHECK(vocabulary.size() > 1'000);
  CHECK(vocabulary.token(bert::special_tokens) == "the");
  const Corpus corpus(words, vocabulary);
  CHECK(std::ranges::count(corpus.tokens(), SpecialToken::unk) == 0);
}

TEST_CASE("as many predictions as BERT has") {
  CHECK(bert::predictions_of(128) == 20);
  CHECK(bert::masked_of(128) == 19);
  CHECK(bert::predictions_of(512) == 77);
  CHECK(bert::masked_of(512) == 77);
  for (std::size_t length = 3; length < 1000; ++length) {
    REQUIRE(bert::masked_of(length) >= 1);
    REQUIRE(bert::masked_of(length) <= bert::predictions_of(length));
    REQUIRE(bert::masked_of(length) <= length - 2);
  }
}

TEST_CASE("a sequence is a run of the corpus in which some words are masked") {
  const Words words = counting_words(50, 3);
  const Vocabulary vocabulary(words);
  const Corpus corpus(words, vocabulary);
  const std::size_t length =
      GENERATE(std::size_t{3}, std::size_t{4}, std::size_t{17}, std::size_t{128}, std::size_t{152});
  const TextSource source(corpus, vocabulary.size(), 4, length, 1);
  Batch batch;
  for (std::uint64_t step = 0; step < 50; ++step) {
    source.fill(batch, 0, step);
    REQUIRE(batch.sequences == 4);
    REQUIRE(batch.length == length);
    REQUIRE(batch.predictions == bert::predictions_of(length));
    REQUIRE(batch.tokens.size() == 4 * length);
    REQUIRE(batch.segments == std::vector<std::int32_t>(4 * length, 0));
    for (std::size_t s = 0; s < 4; ++s) {
      std::vector<std::int32_t> tokens(batch.tokens.begin() + std::ptrdiff_t(s * length),
                                       batch.tokens.begin() + std::ptrdiff_t((s + 1) * length));
      std::int32_t before = 0;
      for (std::size_t p = 0; p < batch.predictions; ++p) {
        const std::size_t i = s * batch.predictions + p;
        const bool real = p < bert::masked_of(length);
        REQUIRE(batch.weights[i] == (real ? 1.0F : 0.0F));
        if (!real) {
          REQUIRE(batch.positions[i] == 0);
          REQUIRE(batch.labels[i] == SpecialToken::pad);
          continue;
        }
        REQUIRE(batch.positions[i] > before);  // never [CLS], and no place twice
        before = batch.positions[i];
        tokens.at(static_cast<std::size_t>(before)) = batch.labels[i];
      }
      // With the labels put back it is a run of the text between its two special tokens.
      REQUIRE(tokens.front() == SpecialToken::cls);
      REQUIRE(tokens.back() == SpecialToken::sep);
      const auto begin = tokens.begin() + 1, end = tokens.end() - 1;
      REQUIRE(std::ranges::search(corpus.tokens(), std::ranges::subrange(begin, end)).begin() !=
              corpus.tokens().end());
    }
  }
}

TEST_CASE("masking keeps BERT's proportions") {
  // The words' ids are 5 to 24, and all are drawn; a word drawn at random is the same in 1 of 20.
  constexpr std::size_t vocabulary = 25, length = 64, steps = 400;
  const SyntheticSource source(vocabulary, 8, length, 3);
  std::array<double, vocabulary> drawn{};
  std::array<double, length> places{};
  double masked = 0, kept = 0, predictions = 0;
  Batch batch;
  for (std::uint64_t step = 0; step < steps; ++step) {
    source.fill(batch, 0, step);
    for (std::size_t i = 0; i < batch.weights.size(); ++i) {
      if (batch.weights[i] == 0) continue;
      const auto place = static_cast<std::size_t>(batch.positions[i]);
      const std::int32_t token = batch.tokens[i / batch.predictions * length + place];
      REQUIRE(batch.labels[i] >= 5);
      REQUIRE(batch.labels[i] < 25);
      REQUIRE((token == SpecialToken::mask || token >= 5));
      REQUIRE(token < 25);
      predictions += 1;
      places.at(place) += 1;
      drawn.at(static_cast<std::size_t>(batch.labels[i])) += 1;
      masked += token == SpecialToken::mask ? 1 : 0;
      kept += token == batch.labels[i] ? 1 : 0;
    }
  }
  REQUIRE(predictions == 8 * steps * 10);  // 15 % of 64, rounded to nearest
  // Bounds are five standard deviations or more.
  CHECK(masked / predictions == Catch::Approx(0.8).margin(0.012));
  CHECK(kept / predictions == Catch::Approx(0.1 + 0.1 / 20).margin(0.009));
  for (std::size_t id = 5; id < vocabulary; ++id) {
    CHECK(drawn.at(id) / predictions == Catch::Approx(1 / 20.0).margin(0.0065));
  }
  CHECK(places.front() == 0);
  CHECK(places.back() == 0);
  for (std::size_t place = 1; place + 1 < length; ++place) {
    CHECK(places.at(place) / predictions == Catch::Approx(1 / 62.0).margin(0.0036));
  }
}

TEST_CASE("sequences begin anywhere in the corpus") {
  const Words words = counting_words(20, 1);
  const Vocabulary vocabulary(words);
  const Corpus corpus(words, vocabulary);
  Batch batch;
  std::set<std::int32_t> firsts;
  const TextSource source(corpus, vocabulary.size(), 1, 12, 1);
  for (std::uint64_t step = 0; step < 400; ++step) {
    source.fill(batch, 0, step);
    firsts.insert(batch.positions[0] == 1 ? batch.labels[0] : batch.tokens[1]);
  }
  CHECK(firsts == std::set<std::int32_t>{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
}

TEST_CASE("a batch is a function of seed, rank and step alone") {
  const SyntheticSource source(1000, 2, 32, 7), again(1000, 2, 32, 7), other(1000, 2, 32, 8);
  Batch a, b;
  source.fill(a, 1, 5);
  source.fill(b, 0, 0);  // what was drawn before has no say
  again.fill(b, 1, 5);
  CHECK(same(a, b));
  std::set<std::vector<std::int32_t>> all;
  for (std::uint64_t rank = 0; rank < 8; ++rank) {
    for (std::uint64_t step = 0; step < 8; ++step) {
      source.fill(b, rank, step);
      all.insert(b.tokens);
      other.fill(b, rank, step);
      all.insert(b.tokens);
    }
  }
  CHECK(all.size() == 128);

  // The same on every machine and standard library. The first is SplitMix64's published first
  // number from state 0, the second was computed in Python.
  CHECK(bert::Random(0, 0, 0).next() == 0xe220a8397b1dcdafU);
  CHECK(bert::Random(1, 2, 3).next() == 0x5afb4682bd747a5cU);
}

TEST_CASE("filling a batch again keeps its memory, and another source's size fits it") {
  const SyntheticSource large(100, 4, 64, 1), small(100, 1, 8, 1);
  Batch batch, fresh;
  large.fill(batch, 0, 0);
  const auto memory = [&] {
    return std::array{static_cast<const void*>(batch.tokens.data()),
                      static_cast<const void*>(batch.segments.data()),
                      static_cast<const void*>(batch.positions.data()),
                      static_cast<const void*>(batch.labels.data()),
                      static_cast<const void*>(batch.weights.data())};
  };
  const auto before = memory();
  small.fill(batch, 0, 1);
  small.fill(fresh, 0, 1);
  CHECK(same(batch, fresh));
  large.fill(batch, 0, 2);
  CHECK(before == memory());
}

TEST_CASE("batches that can't be are refused in words") {
  const Words words = counting_words(20, 1);
  const Vocabulary vocabulary(words);
  const Corpus corpus(words, vocabulary);
  CHECK_NOTHROW(TextSource(corpus, 25, 1, 22, 1));
  CHECK_NOTHROW(TextSource(corpus, 30522, 1, 22, 1));
  CHECK_THROWS_WITH(TextSource(corpus, 25, 1, 23, 1),
                    ContainsSubstring("20 words") && ContainsSubstring("23"));
  CHECK_THROWS_WITH(TextSource(corpus, 24, 1, 8, 1), ContainsSubstring("same vocabulary"));
  CHECK_THROWS_WITH(SyntheticSource(25, 1, 2, 1), ContainsSubstring("ask for 3"));
  CHECK_THROWS_WITH(SyntheticSource(25, 0, 8, 1), ContainsSubstring("at least 1"));
  CHECK_THROWS_WITH(SyntheticSource(6, 1, 8, 1), ContainsSubstring("give it 7"));
  CHECK_THROWS_AS(SyntheticSource(25, 1, 0, 1), InputError);
}

TEST_CASE("memory readings are plausible") {
  constexpr std::size_t size = 32U << 20U;
  const auto resident = bert::resident_bytes();
  if (!resident) return;  // not Linux
  CHECK(*resident > 100'000);
  REQUIRE(bert::peak_resident_bytes());
  REQUIRE(bert::available_bytes());
  CHECK(*bert::available_bytes() > 1'000'000);
  CHECK(*bert::available_bytes() < 1ULL << 50U);

  {
    std::vector<char> touched(size, 'x');
    static char* volatile seen;  // or a compiler may do without the vector
    seen = touched.data();
    CHECK(seen[size - 1] == 'x');
  }
  // Sanitizers keep freed memory, so only what must be is asked for. Counters may lag by pages.
  constexpr std::uint64_t lag = 1U << 20U;
  CHECK(*bert::peak_resident_bytes() + lag > *resident + size);
  if (bert::reset_peak()) {
    CHECK(*bert::peak_resident_bytes() < *bert::resident_bytes() + lag);
  }
}

TEST_CASE("available memory is the least of the machine's and every control group's") {
  const Folder folder;
  const auto available = [&] { return bert::available_bytes(folder.root()); };
  CHECK(!available());
  folder.write("proc/meminfo", "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    8000 kB\n");
  CHECK(available() == 8000U * 1024);

  SECTION("version 2: an outer group's limit holds too, cached files are free") {
    folder.write("proc/self/cgroup", "0::/outer/inner\n");
    CHECK(available() == 8000U * 1024);
    folder.write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
    folder.write("sys/fs/cgroup/outer/inner/memory.current", "1000\n");
    CHECK(available() == 8000U * 1024);
    folder.write("sys/fs/cgroup/outer/memory.max", "5000\n");
    folder.write("sys/fs/cgroup/outer/memory.current", "2000\n");
    CHECK(available() == 3000U);
    folder.write("sys/fs/cgroup/outer/memory.stat", "anon 7\ninactive_file 500\n");
    CHECK(available() == 3500U);
    folder.write("sys/fs/cgroup/outer/memory.current", "9000\n");  // above its limit
    CHECK(available() == 0U);
  }
  SECTION("version 1, from inside a container that sees only its own group") {
    folder.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n");
    folder.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    folder.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n");
    CHECK(available() == 8000U * 1024);
    folder.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "6000\n");
    folder.write("sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 100\n");
    CHECK(available() == 4100U);
  }
}

TEST_CASE("a trace has each span under its process and rank") {
  using std::chrono::microseconds;
  const Folder folder;
  const bert::Recorder::TimePoint start{std::chrono::hours(1)};
  bert::Recorder first(2), second(2), other(2);
  first.add("forward", start + microseconds(10), start + microseconds(30));
  first.add("backward", start + microseconds(30), start + microseconds(31));
  first.add("too many", start, start + microseconds(1));
  second.add("forward", start + microseconds(5), start + microseconds(7));
  other.add("update", start + microseconds(100), start + microseconds(150));
  CHECK(first.spans().size() == 2);
  CHECK(first.dropped() == 1);

  const path file = folder.root() / "trace.json";
  const std::vector<bert::Track> tracks{{"replicated", "rank 0", &first},
                                        {"replicated", "rank \"1\"", &second},
                                        {"sharded", "rank 0", &other}};
  bert::write_trace(file, tracks);
  std::ifstream stream(file);
  const nlohmann::json trace = nlohmann::json::parse(stream);
  CHECK(trace.at("otherData").at("dropped_spans") == 1);

  std::set<std::string> names;
  std::vector<nlohmann::json> spans;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const std::string where = std::to_string(event.at("pid").get<int>()) + "." +
                              std::to_string(event.at("tid").get<int>());
    if (event.at("ph") == "M") {
      names.insert(event.at("name").get<std::string>() + " " + where + " " +
                   event.at("args").at("name").get<std::string>());
    } else {
      REQUIRE(event.at("ph") == "X");
      spans.push_back({where, event.at("name"), event.at("ts"), event.at("dur")});
    }
  }
  CHECK(names == std::set<std::string>{"process_name 0.0 replicated", "process_name 1.0 sharded",
                                       "thread_name 0.0 rank 0", "thread_name 0.1 rank \"1\"",
                                       "thread_name 1.0 rank 0"});
  CHECK(spans == std::vector<nlohmann::json>{{"0.0", "forward", 5.0, 20.0},
                                             {"0.0", "backward", 25.0, 1.0},
                                             {"0.1", "forward", 0.0, 2.0},
                                             {"1.0", "update", 95.0, 50.0}});

  bert::write_trace(file, {});  // no spans: still a trace
  std::ifstream empty(file);
  CHECK(nlohmann::json::parse(empty).at("traceEvents").empty());

  const path nowhere = folder.root() / "absent" / "trace.json";
  CHECK_THROWS_WITH(bert::write_trace(nowhere, tracks), ContainsSubstring(nowhere.string()));
  CHECK_THROWS_AS(bert::write_trace(nowhere, tracks), InputError);
  if (std::filesystem::exists("/dev/full")) {
    CHECK_THROWS_WITH(bert::write_trace("/dev/full", tracks), ContainsSubstring("No space"));
  }
}
