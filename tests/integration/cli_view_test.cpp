// What stands between other people's text and a terminal.
#include <catch2/catch.hpp>
#include <clocale>

#include "cli/view/escape.hpp"
#include "cli/view/table.hpp"
#include "cli/view/utf8.hpp"

using namespace gcoalesce::cli;

TEST_CASE("control characters are escaped, text of any language is not") {
    CHECK(escape_controls("plain\ttext\nand more\n") == "plain\ttext\nand more\n");
    CHECK(escape_controls("Grüße, 你好, 👋🏽") == "Grüße, 你好, 👋🏽");
    CHECK(escape_controls("\x1b[31mred\x07\x7f") == "\\x1b[31mred\\x07\\x7f");
    CHECK(escape_controls(std::string("a\0b", 3)) == "a\\x00b");
    CHECK(escape_controls("\xc2\x9b"
                          "31m") == "\\xc2\\x9b31m"); // CSI as one character of C1
    CHECK(escape_controls("over\rwritten") == "over\\x0dwritten");
    CHECK(escape_controls("a line\r\nand another") == "a line\r\nand another");
}

TEST_CASE("bytes that are no UTF-8 are escaped one by one") {
    CHECK(escape_controls("\xff") == "\\xff");
    CHECK(escape_controls("a\xc3") == "a\\xc3");                          // cut
    CHECK(escape_controls("\xc0\x9b") == "\\xc0\\x9b");                   // overlong
    CHECK(escape_controls("\xed\xa0\x80") == "\\xed\\xa0\\x80");          // surrogate
    CHECK(escape_controls("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80"); // beyond U+10FFFF
    CHECK(escape_controls("\xf0\x9f\x91") == "\\xf0\\x9f\\x91");
}

TEST_CASE("a text on one line can be had back") {
    CHECK(escape_line("one\ntwo\tthree\r\\n") == "one\\ntwo\\tthree\\r\\\\n");
}

TEST_CASE("tables align what is wide, narrow and combining by the columns of a terminal") {
    std::setlocale(LC_CTYPE, "C.UTF-8");
    CHECK(display_width("abc") == 3);
    CHECK(display_width("你好") == 4);
    CHECK(display_width("e\u0301") == 1);
    CHECK(display_prefix("你好", 3) == "你");

    Table table({{"NAME"}, {"N", Align::right}, {"NOTE"}});
    table.add({"你好", "7", "wide"});
    table.add({"ab", "1234", "two\nlines"});
    CHECK(table.render(0) == "NAME     N  NOTE\n"
                             "你好     7  wide\n"
                             "ab    1234  two\\nlines\n");
    // Half a number is another number: the column goes. A text that only begins to fit says so.
    CHECK(table.render(9) == "NAME\n你好\nab\n");
    CHECK(table.render(10) == "NAME     N\n你好     7\nab    1234\n");
    CHECK(table.render(17) == "NAME     N  NOTE\n"
                              "你好     7  wide\n"
                              "ab    1234  two\\…\n");
    CHECK(table.render(3) == "NA…\n你…\nab\n");
}

TEST_CASE("a text goes on in lines below where it does not fit") {
    std::setlocale(LC_CTYPE, "C.UTF-8");
    using Lines = std::vector<std::string>;
    CHECK(wrapped("", 10) == Lines{""});
    CHECK(wrapped("one two three", 20) == Lines{"one two three"});
    CHECK(wrapped("one two three", 7) == Lines{"one two", "three"});
    CHECK(wrapped("one two three", 8) == Lines{"one two", "three"});
    CHECK(wrapped("one  two", 4) == Lines{"one", "two"});
    CHECK(wrapped("abcdefghij k", 4) == Lines{"abcd", "efgh", "ij k"});
    CHECK(wrapped("你好你好", 5) == Lines{"你好", "你好"});
    CHECK(wrapped("你好", 1) == Lines{"你", "好"});
    CHECK(wrapped("  ab cd", 5) == Lines{"  ab", "cd"});
    CHECK(hanging("label", "one two", 8, 0) == "label   one two\n");
    CHECK(hanging("label", "a text that is far too long for it", 8, 34) ==
          "label   a text that is far too\n        long for it\n");
    CHECK(hanging("label", "a text that is far too long for it", 8, 20) ==
          "label\n    a text that is\n    far too long for\n    it\n");
    CHECK(hanging("label", "short", 8, 20) == "label   short\n");
    CHECK(hanging("", "a text that is far too long", 20, 24) == "    a text that is far\n    too long\n");

    Table table({{"NAME"}, {"N", Align::right}, {"NOTE", Align::wrapped}});
    table.add({"first", "7", "what there is to say of the first one"});
    table.add({"second", "12", ""});
    CHECK(table.render(0) == "NAME     N  NOTE\n"
                             "first    7  what there is to say of the first one\n"
                             "second  12\n");
    CHECK(table.render(36) == "NAME     N  NOTE\n"
                              "first    7  what there is to say of\n"
                              "            the first one\n"
                              "second  12\n");
    Table text({{"QUESTION"}, {"FOUND", Align::wrapped}});
    text.add({"a long question", "yes"});
    CHECK(text.render(12) == "QUESTION\n    FOUND\na long ques…\n    yes\n");
    CHECK(table.render(20) == "NAME     N  NOTE\n"
                              "first    7\n"
                              "    what there is to\n"
                              "    say of the first\n"
                              "    one\n"
                              "second  12\n");
}

TEST_CASE("JSON for a terminal says the same without DEL and C1") {
    CHECK(escape_json("{\"a\":\"x\x7f\xc2\x80\xc2\x9fy\xc2\xa0\xc3\xa9\"}") ==
          "{\"a\":\"x\\u007f\\u0080\\u009fy\xc2\xa0\xc3\xa9\"}");
    CHECK(escape_json("\xc2") == "\xc2"); // cut
}
