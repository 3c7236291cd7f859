// SPDX-License-Identifier: Apache-2.0
// The header of safetensors files: what is written is read, and whatever breaks a rule of the
// format is refused by an error that names file, tensor and rule.
#include <zero/checkpoint/safetensors.hpp>
#include <zero/error.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "memory_file.hpp"

namespace {

using zero::SafetensorsHeader;
using zero::TensorEntry;

std::string length_of(std::uint64_t bytes) {
  std::string text;
  for (int i = 0; i < 8; ++i, bytes >>= 8U) text += static_cast<char>(bytes & 0xffU);
  return text;
}

/// @param data bytes after the header
std::string file_of(const std::string& json, std::size_t data) {
  return length_of(json.size()) + json + std::string(data, 'x');
}

SafetensorsHeader read(const std::string& file) {
  return zero::read_safetensors_header(MemoryFile(std::as_bytes(std::span(file))));
}

/// What `f` throws, as text; empty: it throws nothing.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const zero::CheckpointError& error) {
    return error.what();
  }
  return {};
}

std::string tensor_of(std::string_view name, std::string_view fields) {
  return "\"" + std::string(name) + "\":{" + std::string(fields) + "}";
}

/// A header of one tensor, t.
std::string one(std::string_view fields) { return "{" + tensor_of("t", fields) + "}"; }

struct Malformed {
  std::string name;
  std::string json;
  std::size_t data;  // bytes
  std::vector<std::string> says;
};

const std::vector<Malformed>& malformed() {
  const std::string good = R"("dtype":"U8","shape":[1],"data_offsets":[0,1])";
  const std::string second = R"("dtype":"U8","shape":[1],"data_offsets":[1,2])";
  static const std::vector<Malformed> cases{
      {"nothing", "", 0, {"does not begin with '{'"}},
      {"an array", "[]", 0, {"does not begin with '{'"}},
      {"space before", " {}", 0, {"does not begin with '{'"}},
      {"a byte order mark", "\xef\xbb\xbf{}", 0, {"does not begin with '{'"}},
      {"open end", "{", 0, {"no JSON", "unexpected end of input"}},
      {"open text", R"({"t)", 0, {"no JSON", "missing closing quote"}},
      {"a comma too many", "{\"t\":{" + good + "},}", 1, {"no JSON", "byte"}},
      {"a comment", "{}/**/", 0, {"no JSON"}},
      {"a second object", "{}{}", 0, {"no JSON", "expected end of input"}},
      {"a zero byte and more", std::string("{}\0{}", 5), 0, {"zero byte"}},
      {"zero bytes as padding", std::string("{}\0\0", 4), 0, {"zero byte"}},
      {"not UTF-8", "{\"\xff\":{" + good + "}}", 1, {"no JSON in UTF-8", "ill-formed UTF-8"}},
      {"cut UTF-8", "{\"\xc3\":{" + good + "}}", 1, {"ill-formed UTF-8"}},
      {"UTF-8 of a surrogate", "{\"\xed\xa0\x80\":{" + good + "}}", 1, {"ill-formed UTF-8"}},
      {"half a surrogate", R"({"\ud834":{)" + good + "}}", 1, {"no JSON", "surrogate"}},
      {"a line feed in a text", "{\"a\nb\":{" + good + "}}", 1, {"no JSON", "control character"}},
      {"NaN", one(R"("dtype":"U8","shape":[NaN],"data_offsets":[0,1])"), 1, {"no JSON"}},
      {"a leading zero", one(R"("dtype":"U8","shape":[01],"data_offsets":[0,1])"), 1, {"no JSON"}},
      {"a tensor that is null", R"({"t":null})", 0, {"\"t\"", "a tensor is an object", "null"}},
      {"a tensor that is a number", R"({"t":1})", 0, {"\"t\"", "a tensor is an object"}},
      {"a tensor that is a text", R"({"t":"1"})", 0, {"\"t\"", "a tensor is an object"}},
      {"a tensor that is an array", R"({"t":[]})", 0, {"\"t\"", "a tensor is an object"}},
      {"deep arrays",
       R"({"t":)" + std::string(100000, '[') + std::string(100000, ']') + "}",
       0,
       {"\"t\"", "a tensor is an object"}},
      {"a tensor twice",
       "{" + tensor_of("t", good) + "," + tensor_of("t", second) + "}",
       2,
       {"tensor \"t\"", "is there twice"}},
      {"a tensor twice, once escaped",
       "{" + tensor_of("t", good) + "," + tensor_of("u", second) + "," +
           tensor_of("\\u0074", R"("dtype":"U8","shape":[0],"data_offsets":[2,2])") + "}",
       2,
       {"tensor \"t\"", "is there twice"}},
      {"dtype twice",
       one(R"("dtype":"U8",)" + good),
       1,
       {"tensor \"t\"", "the key \"dtype\" twice"}},
      {"shape twice",
       one(good + R"(,"shape":[1])"),
       1,
       {"tensor \"t\"", "the key \"shape\" twice"}},
      {"data_offsets twice",
       one(good + R"(,"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "the key \"data_offsets\" twice"}},
      {"no dtype", one(R"("shape":[1],"data_offsets":[0,1])"), 1, {"tensor \"t\"", "no dtype"}},
      {"no shape", one(R"("dtype":"U8","data_offsets":[0,1])"), 1, {"tensor \"t\"", "no shape"}},
      {"no data_offsets",
       one(R"("dtype":"U8","shape":[1])"),
       1,
       {"tensor \"t\"", "no data_offsets"}},
      {"another key", one(good + R"(,"strides":[1])"), 1, {"tensor \"t\"", "the key \"strides\""}},
      {"a dtype that nobody knows",
       one(R"("dtype":"F33","shape":[1],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "dtype \"F33\""}},
      {"a dtype in small letters",
       one(R"("dtype":"u8","shape":[1],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "dtype \"u8\""}},
      {"a dtype of half a byte",
       one(R"("dtype":"F4","shape":[2],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "dtype \"F4\""}},
      {"a dtype that is a number",
       one(R"("dtype":8,"shape":[1],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "dtype is a text", "number"}},
      {"a shape that is a number",
       one(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape is an array"}},
      {"a shape that is an object",
       one(R"("dtype":"U8","shape":{},"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape is an array", "object"}},
      {"a dimension that is a text",
       one(R"("dtype":"U8","shape":["1"],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape has whole numbers", "text"}},
      {"a dimension that is an array",
       one(R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape has whole numbers", "array"}},
      {"a negative dimension",
       one(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape has whole numbers", "negative"}},
      {"minus zero",
       one(R"("dtype":"U8","shape":[-0],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "shape has whole numbers", "negative"}},
      {"a fraction",
       one(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape has whole numbers", "\"1.0\""}},
      {"an exponent",
       one(R"("dtype":"U8","shape":[1e0],"data_offsets":[0,1])"),
       1,
       {"tensor \"t\"", "shape has whole numbers", "\"1e0\""}},
      {"a dimension of 2^64",
       one(R"("dtype":"U8","shape":[18446744073709551616,0],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "shape has whole numbers", "18446744073709551616"}},
      {"no offsets",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[])"),
       1,
       {"tensor \"t\"", "two whole numbers"}},
      {"one offset",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[0])"),
       1,
       {"tensor \"t\"", "two whole numbers", "one number"}},
      {"three offsets",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,2])"),
       1,
       {"tensor \"t\"", "two whole numbers"}},
      {"an offset that is true",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[0,true])"),
       1,
       {"tensor \"t\"", "two whole numbers", "true or false"}},
      {"an offset of 2^64",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616])"),
       1,
       {"tensor \"t\"", "two whole numbers", "18446744073709551616"}},
      {"offsets that run backwards",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"),
       1,
       {"tensor \"t\"", "[1, 0] end before they begin"}},
      {"too many bytes for the shape",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[0,2])"),
       2,
       {"tensor \"t\"", "are 2 bytes, but dtype and shape make 1"}},
      {"too few bytes for the dtype",
       one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
       4,
       {"tensor \"t\"", "are 4 bytes, but dtype and shape make 8"}},
      {"too few bytes for a scalar",
       one(R"("dtype":"F32","shape":[],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "are 0 bytes, but dtype and shape make 4"}},
      {"a shape of more than 2^64 elements that would wrap to 0",
       one(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "more bytes than 64 bits can count"}},
      {"a shape of 2^61 doubles that would wrap to 0",
       one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "more bytes than 64 bits can count"}},
      {"an overflow before a zero",
       one(R"("dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0])"),
       0,
       {"tensor \"t\"", "more bytes than 64 bits can count"}},
      {"a hole before the first",
       one(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"),
       2,
       {"tensor \"t\"", "a hole of 1 bytes"}},
      {"a hole between two",
       "{" + tensor_of("a", good) + "," +
           tensor_of("t", R"("dtype":"U8","shape":[1],"data_offsets":[3,4])") + "}",
       4,
       {"tensor \"t\"", "a hole of 2 bytes"}},
      {"a hole before an empty tensor",
       one(R"("dtype":"U8","shape":[0],"data_offsets":[1,1])"),
       1,
       {"tensor \"t\"", "a hole of 1 bytes"}},
      {"an overlap",
       "{" + tensor_of("a", R"("dtype":"U8","shape":[3],"data_offsets":[0,3])") + "," +
           tensor_of("t", R"("dtype":"U8","shape":[2],"data_offsets":[2,4])") + "}",
       4,
       {"tensor \"t\"", "overlap"}},
      {"one in another",
       "{" + tensor_of("t", R"("dtype":"U8","shape":[1],"data_offsets":[1,2])") + "," +
           tensor_of("a", R"("dtype":"U8","shape":[3],"data_offsets":[0,3])") + "}",
       3,
       {"tensor \"t\"", "overlap"}},
      {"an empty tensor in another",
       "{" + tensor_of("t", R"("dtype":"U8","shape":[0],"data_offsets":[1,1])") + "," +
           tensor_of("a", R"("dtype":"U8","shape":[3],"data_offsets":[0,3])") + "}",
       3,
       {"tensor \"t\"", "overlap"}},
      {"beyond the end",
       one(good),
       0,
       {"tensor \"t\"", "beyond the file's end", "0 bytes of data"}},
      {"far beyond the end",
       one(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615])"),
       1,
       {"tensor \"t\"", "beyond the file's end"}},
      {"bytes after the last", one(good), 2, {"2 bytes of data, but its tensors end at 1"}},
      {"bytes and no tensor", "{}", 1, {"1 bytes of data, but its tensors end at 0"}},
      {"metadata that is a text", R"({"__metadata__":"a"})", 0, {"\"__metadata__\"", "object"}},
      {"metadata that is null", R"({"__metadata__":null})", 0, {"\"__metadata__\"", "object"}},
      {"a number in the metadata",
       R"({"__metadata__":{"step":3}})",
       0,
       {"\"__metadata__\"", "\"step\" has a text", "number"}},
      {"an object in the metadata",
       R"({"__metadata__":{"step":{}}})",
       0,
       {"\"__metadata__\"", "\"step\" has a text", "object"}},
      {"a key of the metadata twice",
       R"({"__metadata__":{"a":"1","a":"1"}})",
       0,
       {"\"__metadata__\"", "the key \"a\" twice"}},
      {"metadata twice",
       R"({"__metadata__":{},"__metadata__":{}})",
       0,
       {"\"__metadata__\"", "is there twice"}},
  };
  return cases;
}

}  // namespace

TEST_CASE("what breaks a rule of safetensors is refused in words", "[checkpoint]") {
  for (const Malformed& each : malformed()) {
    CAPTURE(each.name);
    const std::string says = error_of([&] { (void)read(file_of(each.json, each.data)); });
    CAPTURE(says);
    CHECK(says.starts_with("safetensors file in memory: "));
    for (const std::string& word : each.says) {
      CAPTURE(word);
      CHECK(says.find(word) != std::string::npos);
    }
    CHECK(says.size() < 400);  // whatever is in the file
  }
}

TEST_CASE("a message shows a tensor's name on one line, and not all of a long one",
          "[checkpoint]") {
  const auto says_of = [](const std::string& name) {
    return error_of([&] { (void)read(file_of("{" + tensor_of(name, "") + "}", 0)); });
  };
  CHECK(says_of("a\\n\\u0000\\u007f\\\\b") ==
        "safetensors file in memory: tensor \"a\\x0a\\x00\\x7f\\b\": has no dtype");
  CHECK(says_of(std::string(79, 'a') + "ü" + std::string(1000, 'b')) ==
        "safetensors file in memory: tensor \"" + std::string(79, 'a') + "…\": has no dtype");
}

TEST_CASE("a safetensors header's length is checked first", "[checkpoint]") {
  const auto refused = [](const std::string& file, std::string_view rule) {
    const std::string says = error_of([&] { (void)read(file); });
    CAPTURE(says);
    CHECK(says.find(rule) != std::string::npos);
  };
  for (const std::size_t bytes : {0U, 1U, 7U}) refused(std::string(bytes, '\0'), "too few");
  refused(length_of(0), "does not begin with '{'");
  refused(length_of(3) + "{}", "more than the file has");
  refused(length_of(zero::safetensors_header_limit) + "{}", "more than the file has");
  refused(length_of(zero::safetensors_header_limit + 1) + "{}", "more than 100 MB");
  refused(length_of(std::uint64_t{1} << 63U) + "{}", "more than 100 MB");
  refused(length_of(std::numeric_limits<std::uint64_t>::max()) + "{}", "more than 100 MB");
  refused(length_of(std::numeric_limits<std::uint64_t>::max() - 7) + "{}", "more than 100 MB");
  // The last byte of the file may be the header's.
  CHECK(read(length_of(2) + "{}").data_begin == 10);
  const std::string says =
      error_of([] { (void)zero::parse_safetensors_header("{}", 9, "a file"); });
  CHECK(says.find("longer than the file") != std::string::npos);
}

TEST_CASE("a header may be as long as the format allows, and no longer", "[checkpoint]") {
  const auto says_of = [](std::size_t bytes) {
    const std::string text(bytes, 'x');  // refused at its first byte, if its length is not
    return error_of([&] { (void)zero::parse_safetensors_header(text, 8 + text.size(), "f"); });
  };
  CHECK(says_of(zero::safetensors_header_limit) ==
        "safetensors file f: the header does not begin with '{'");
  CHECK(says_of(zero::safetensors_header_limit + 1) ==
        "safetensors file f: the header is longer than 100 MB");
}

TEST_CASE("a safetensors header is read in the order of its bytes", "[checkpoint]") {
  const std::string json =
      R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},)"
      R"("__metadata__":{"format":"pt","":""},)"
      R"("none":{"data_offsets":[2,2],"shape":[7,0],"dtype":"I64"},)"
      R"("\u0061 \ud834\udd1e":{"shape":[],"dtype":"BF16","data_offsets":[0,2]}}  )";
  const SafetensorsHeader header = read(file_of(json, 10));
  CHECK(header.data_begin == 8 + json.size());
  CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"", ""}});
  CHECK(header.tensors == std::vector<TensorEntry>{{"a \xf0\x9d\x84\x9e", "BF16", {}, 0, 2},
                                                   {"none", "I64", {7, 0}, 2, 2},
                                                   {"b", "F32", {2, 1}, 2, 10}});
}

TEST_CASE("a zero before what would overflow makes a tensor empty", "[checkpoint]") {
  const std::string json =
      one(R"("dtype":"U8","shape":[0,18446744073709551615,2],"data_offsets":[0,0])");
  CHECK(read(file_of(json, 0)).tensors.at(0).shape.size() == 3);
}

TEST_CASE("what a header is made from is read from it", "[checkpoint]") {
  const std::map<std::string, std::string> metadata{
      {"format", "pt"}, {"quotes", "\"\\\n\x01"}, {"", "ü♥"}};
  std::vector<TensorEntry> tensors;
  std::uint64_t end = 0;
  const auto add = [&](std::string name, std::string dtype, std::vector<std::size_t> shape) {
    std::uint64_t bytes = zero::dtype_bytes(dtype);
    for (const std::size_t dimension : shape) bytes *= dimension;
    tensors.push_back({std::move(name), std::move(dtype), std::move(shape), end, end + bytes});
    end += bytes;
  };
  const std::vector<std::string> dtypes{
      "BOOL",        "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
      "F8_E5M2FNUZ", "U16", "I16", "F16",     "BF16",    "U32",     "I32",
      "F32",         "U64", "I64", "F64",     "C64"};
  for (const std::string& dtype : dtypes) {
    add(dtype, dtype, {3, 5});
    add(dtype + ".scalar", dtype, {});
    add(dtype + ".empty", dtype, {2, 0});
  }
  add(std::string("zero\0byte\n\"", 11), "U8", {1});
  add("", "U8", {1});
  for (std::size_t first = 0; first <= tensors.size(); ++first) {
    // As many as there are, so that every remainder of the padding occurs.
    const std::span few(tensors.data(), first);
    const std::string text = zero::format_safetensors_header(few, metadata);
    CHECK(text.size() % 8 == 0);
    CHECK(text.substr(0, 8) == length_of(text.size() - 8));
    CHECK(text[8] == '{');
    CHECK(text.substr(text.size() - 8) != std::string(8, ' '));
    const SafetensorsHeader header =
        read(text + std::string(first == 0 ? 0 : tensors[first - 1].end, 'x'));
    CHECK(header.data_begin == text.size());
    CHECK(header.metadata == metadata);
    CHECK(std::equal(few.begin(), few.end(), header.tensors.begin(), header.tensors.end()));
  }
  CHECK(zero::format_safetensors_header({}, {}) == length_of(8) + "{}      ");
}

TEST_CASE("no header is made that would break a rule", "[checkpoint]") {
  const auto refused = [](const std::vector<TensorEntry>& tensors, std::string_view rule,
                          const std::map<std::string, std::string>& metadata = {}) {
    const std::string says =
        error_of([&] { (void)zero::format_safetensors_header(tensors, metadata); });
    CAPTURE(says);
    CHECK(says.find("to be written") != std::string::npos);
    CHECK(says.find(rule) != std::string::npos);
  };
  refused({{"t", "F33", {}, 0, 1}}, "tensor \"t\": has the dtype \"F33\"");
  refused({{"t", "U8", {}, 0, 2}}, "tensor \"t\": data_offsets [0, 2] are 2 bytes");
  refused({{"t", "U8", {}, 1, 2}}, "tensor \"t\": data_offsets [1, 2] leave a hole");
  refused({{"t", "U8", {}, 0, 1}, {"u", "U8", {}, 0, 1}}, "overlap");
  refused({{"t", "U8", {}, 0, 1}, {"t", "U8", {}, 1, 2}}, "tensor \"t\": is there twice");
  refused({{"__metadata__", "U8", {}, 0, 1}}, "tensor \"__metadata__\": the format keeps");
  refused({{"\xff", "U8", {}, 0, 1}}, "is not UTF-8");
  refused({}, "is not UTF-8", {{"key", "\xff"}});
}

TEST_CASE("the bytes of a dtype are the format's", "[checkpoint]") {
  STATIC_REQUIRE(zero::dtype_bytes("BF16") == 2);
  for (const char* one_byte : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"}) {
    CHECK(zero::dtype_bytes(one_byte) == 1);
  }
  for (const char* two : {"U16", "I16", "F16", "BF16"}) CHECK(zero::dtype_bytes(two) == 2);
  for (const char* four : {"U32", "I32", "F32"}) CHECK(zero::dtype_bytes(four) == 4);
  for (const char* eight : {"U64", "I64", "F64", "C64"}) CHECK(zero::dtype_bytes(eight) == 8);
  for (const char* none : {"", "F4", "F6_E2M3", "f32", "F32 ", "F", "F320"}) {
    CHECK(zero::dtype_bytes(none) == 0);
  }
}
