/* A server of known timing: OpenAI's two completion endpoints, and a log of when each byte left.
 *
 *     cc -O2 -o server server.c && ./server LOG [CHUNKS [FIRST_US [GAP_US [PORT]]]]
 *
 * Every answer is CHUNKS events of one token each: the first FIRST_US after the whole request was
 * here, the others GAP_US apart, planned from that one moment, so that lateness does not add up.
 * Headers go out at once. Usage, [DONE] and the end of the body leave with the last token.
 *
 * Prints its port. SIGTERM ends it, and so does its parent's end. LOG is binary, native byte order,
 * one record an answer when it is whole or broken off:
 *
 *     char key[48]          X-Request-Id; empty: none was sent
 *     int64 serial          place in the order of arrival; the answer's id is "cmpl-" and this
 *     int64 arrived_ns      CLOCK_MONOTONIC after the read that completed the request
 *     int64 arrived_unix_ns the same on CLOCK_REALTIME
 *     int64 sent_ns[CHUNKS] CLOCK_MONOTONIC just before the send; 0: never sent
 *
 * Prompt tokens are the words of a text, or the numbers of a list.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 16, OUT_BYTES = 4096, EVENTS = 256, KEY_BYTES = 48, S = 1000000000 };

struct record {
    char key[KEY_BYTES];
    int64_t serial, arrived_ns, arrived_unix_ns, sent_ns[];
};

struct connection {
    int fd;   /* -1: the peer has gone */
    char *in; /* read and not yet answered, NUL-terminated */
    size_t in_bytes, in_room;
    bool answering, chat, usage;
    int chunk, prompt_tokens;
    int64_t due_ns;
    struct record *record;
    struct connection *next;
};

/* Due times only grow along either queue: arrival plus a constant, due time plus a constant. */
struct queue {
    struct connection *first, **last;
};

static int chunks = 64, poller;
static int64_t first_ns = 50000000, gap_ns = 10000000, arrivals;
static FILE *record_log;
static struct queue firsts = {NULL, &firsts.first}, others = {NULL, &others.first};
static volatile sig_atomic_t stopping;

static int64_t now_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * S + t.tv_nsec;
}

static size_t record_bytes(void)
{
    return sizeof(struct record) + chunks * sizeof(int64_t);
}

static void put(struct queue *q, struct connection *c)
{
    c->next = NULL;
    *q->last = c;
    q->last = &c->next;
}

static struct connection *take(struct queue *q)
{
    struct connection *c = q->first;
    q->first = c->next;
    if (!q->first)
        q->last = &q->first;
    return c;
}

static struct queue *soonest(void)
{
    if (!firsts.first || !others.first)
        return firsts.first ? &firsts : others.first ? &others : NULL;
    return firsts.first->due_ns < others.first->due_ns ? &firsts : &others;
}

/* The connection goes with its peer, or once no queue holds it. */
static void hang_up(struct connection *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    if (!c->answering) {
        free(c->in);
        free(c);
    }
}

static bool deliver(struct connection *c, const char *bytes, size_t n)
{
    return c->fd >= 0 && send(c->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n;
}

/* Append one server-sent event as one HTTP chunk; returns the new end. */
static char *event(char *out, const char *format, ...)
{
    char data[OUT_BYTES / 4];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(data, sizeof data, format, args);
    va_end(args);
    return out + sprintf(out, "%x\r\ndata: %s\n\n\r\n", n + 8, data);
}

#define EVENT(KIND, REST) \
    "{\"id\":\"cmpl-%ld\",\"object\":\"" KIND "\",\"created\":1,\"model\":\"known\"," REST "}"
#define CHAT "chat.completion.chunk"
#define TEXT "text_completion"
#define CHOICE(WORD) "\"choices\":[{\"index\":0," WORD ",\"logprobs\":null,\"finish_reason\":%s}]"
#define USAGE                                                                            \
    "\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,"           \
    "\"total_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":0}}"

static char *token(const struct connection *c, char *out)
{
    long serial = c->record->serial;
    const char *word = c->chunk ? " token" : "token";
    const char *reason = c->chunk == chunks - 1 ? "\"length\"" : "null";
    if (!c->chat)
        return event(out, EVENT(TEXT, CHOICE("\"text\":\"%s\"")), serial, word, reason);
    return event(out, EVENT(CHAT, CHOICE("\"delta\":{%s\"content\":\"%s\"}")), serial,
                 c->chunk ? "" : "\"role\":\"assistant\",", word, reason);
}

static char *closing(const struct connection *c, char *out)
{
    if (c->usage)
        out = event(out, c->chat ? EVENT(CHAT, USAGE) : EVENT(TEXT, USAGE), c->record->serial,
                    c->prompt_tokens, chunks, c->prompt_tokens + chunks);
    return stpcpy(event(out, "[DONE]"), "0\r\n\r\n");
}

static void answer_next(struct connection *c)
{
    char out[OUT_BYTES], *end = token(c, out);
    if (c->chunk == chunks - 1)
        end = closing(c, end);
    int64_t sent_ns = now_ns(CLOCK_MONOTONIC);
    if (deliver(c, out, end - out)) {
        c->record->sent_ns[c->chunk++] = sent_ns;
        c->due_ns += gap_ns;
    } else {
        hang_up(c);
    }
}

static void reply(struct connection *c, const char *status, const char *body)
{
    char out[OUT_BYTES];
    int n = sprintf(out,
                    "HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
                    "Content-Length: %zu\r\n\r\n%s",
                    status, strlen(body), body);
    deliver(c, out, n);
}

/* What follows `name`, spaces skipped, if it stands before `end`; otherwise NULL. */
static const char *after(const char *text, const char *end, const char *name)
{
    const char *found = strcasestr(text, name);
    if (!found || found >= end)
        return NULL;
    found += strlen(name);
    return found + strspn(found, " ");
}

static int count_tokens(const char *prompt)
{
    bool text = *prompt == '"';
    int n = 1;
    for (const char *p = prompt + 1; *p && *p != (text ? '"' : ']'); p++)
        n += *p == (text ? ' ' : ',');
    return n;
}

static void begin_answer(struct connection *c, const char *body, const char *end)
{
    const char *prompt = after(body, end, c->chat ? "\"content\":" : "\"prompt\":");
    const char *stream = after(body, end, "\"stream\":");
    if (!prompt || !stream || *stream != 't') {
        reply(c, "400 Bad Request", "{\"error\":\"a prompt and stream=true, please\"}");
        return;
    }
    if (c->chat && *prompt == '[') /* parts: the first one's text */
        prompt = after(prompt, end, "\"text\":");
    const char *usage = after(body, end, "\"include_usage\":");
    const char *key = after(c->in, body, "\r\nx-request-id:");
    c->prompt_tokens = prompt ? count_tokens(prompt) : 0;
    c->usage = usage && *usage == 't';
    c->chunk = 0;
    c->answering = true;
    c->record = calloc(1, record_bytes());
    if (key)
        snprintf(c->record->key, KEY_BYTES, "%.*s", (int)strcspn(key, "\r"), key);
    c->record->serial = arrivals++;
    c->record->arrived_unix_ns = now_ns(CLOCK_REALTIME);
    c->record->arrived_ns = now_ns(CLOCK_MONOTONIC);
    c->due_ns = c->record->arrived_ns + first_ns;
    put(&firsts, c);
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    deliver(c, head, sizeof head - 1);
}

/* Answer the request at the front of what was read; false: there is no whole one. */
static bool answer_front(struct connection *c)
{
    char *blank = c->in_bytes && !c->answering ? strstr(c->in, "\r\n\r\n") : NULL;
    if (!blank)
        return false;
    char *body = blank + 4;
    const char *length = after(c->in, body, "\r\ncontent-length:");
    size_t bytes = body - c->in + (length ? strtoul(length, NULL, 10) : 0);
    if (bytes > c->in_bytes)
        return false;
    c->chat = !strncmp(c->in, "POST /v1/chat/completions ", 26);
    if (c->chat || !strncmp(c->in, "POST /v1/completions ", 21))
        begin_answer(c, body, c->in + bytes);
    else if (!strncmp(c->in, "GET /v1/models ", 15))
        reply(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"known\",\"object\":\"model\","
                           "\"created\":1,\"owned_by\":\"bench\",\"max_model_len\":1048576}]}");
    else if (!strncmp(c->in, "GET /health ", 12))
        reply(c, "200 OK", "{}");
    else
        reply(c, "404 Not Found", "{\"error\":\"no such page\"}");
    c->in_bytes -= bytes;
    memmove(c->in, c->in + bytes, c->in_bytes + 1);
    return true;
}

static void read_more(struct connection *c)
{
    if (c->in_room - c->in_bytes < READ_BYTES)
        c->in = realloc(c->in, c->in_room += 2 * READ_BYTES);
    ssize_t n = recv(c->fd, c->in + c->in_bytes, READ_BYTES - 1, MSG_DONTWAIT);
    if (n <= 0) {
        if (n == 0 || (errno != EAGAIN && errno != EINTR))
            hang_up(c);
        return;
    }
    c->in_bytes += n;
    c->in[c->in_bytes] = '\0';
    while (answer_front(c))
        ;
}

static void end_answer(struct connection *c)
{
    fwrite(c->record, record_bytes(), 1, record_log);
    free(c->record);
    c->answering = false;
    if (c->fd < 0)
        hang_up(c);
    else
        while (answer_front(c))
            ;
}

static void send_what_is_due(void)
{
    struct queue *q;
    while ((q = soonest()) && q->first->due_ns <= now_ns(CLOCK_MONOTONIC)) {
        struct connection *c = take(q);
        if (c->fd >= 0)
            answer_next(c);
        if (c->fd < 0 || c->chunk == chunks)
            end_answer(c);
        else
            put(&others, c);
    }
}

static void welcome(int listener)
{
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
    }
}

static int listen_on(int port)
{
    struct sockaddr_in at = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
    socklen_t size = sizeof at;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, SOMAXCONN))
        err(1, "port %d", port);
    getsockname(fd, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

static void stop(int signal)
{
    stopping = signal;
}

int main(int argc, char **argv)
{
    if (argc < 2 || !(record_log = fopen(argv[1], "wb")))
        errx(2, "give a file for the log");
    chunks = argc > 2 ? atoi(argv[2]) : chunks;
    first_ns = argc > 3 ? atoll(argv[3]) * 1000 : first_ns;
    gap_ns = argc > 4 ? atoll(argv[4]) * 1000 : gap_ns;
    signal(SIGTERM, stop);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_TIMERSLACK, 1);
    /* Ahead of the clients where allowed: its own lateness must not be taken for theirs. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1});
    poller = epoll_create1(0);
    int listener = listen_on(argc > 5 ? atoi(argv[5]) : 0);
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &(struct epoll_event){EPOLLIN, {.ptr = NULL}});
    struct epoll_event ready[EVENTS];
    while (!stopping) {
        struct queue *q = soonest();
        int64_t wait_ns = q ? q->first->due_ns - now_ns(CLOCK_MONOTONIC) : S;
        struct timespec wait = {0};
        if (wait_ns > 0)
            wait = (struct timespec){wait_ns / S, wait_ns % S};
        int n = epoll_pwait2(poller, ready, EVENTS, &wait, NULL);
        for (int i = 0; i < n; i++)
            if (ready[i].data.ptr)
                read_more(ready[i].data.ptr);
            else
                welcome(listener);
        send_what_is_due();
    }
    return fclose(record_log);
}
